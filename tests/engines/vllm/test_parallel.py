"""Two workers, each with some of the heads: what they are shown, and what is read back from them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from kamera import Backbone, ChunkStore
from kamera.ops import kv_distance
from tests.engines.vllm import test_pictures as pictures
from tests.engines.vllm.engine import PICTURES, apart, pictures_directory, start


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where = tmp_path_factory.mktemp("store")
    model = pictures_directory(tmp_path_factory.mktemp("model"))
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    llm = start(model, where, {"harvest": "256MiB"}, scheduling_policy="priority", **two, **PICTURES)
    backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
    yield pictures.Bed(llm, backbone, ChunkStore.open(where), where)
    llm.llm_engine.engine_core.shutdown()


def test_full_rank_patches_give_the_two_workers_own_answers(bed):
    asked = pictures.items(bed, range(5), pictures.FULL, 4)
    assert len(asked) >= 20
    assert all(i.served.outputs[0].token_ids == i.cold.outputs[0].token_ids for i in asked)
    assert max(apart(i.cold, i.served) for i in asked) <= 2e-5
    assert pictures.share([pictures.text(i.cold) == i.wanted for i in asked]) >= 0.95


def test_an_object_that_is_lost_is_computed_by_both(bed):
    item, failed = pictures.served_without(bed, 2)
    assert failed == 1 and pictures.text(item.served) == item.wanted
    assert apart(item.cold, item.served) <= 2e-5


def test_what_two_workers_computed_is_what_the_model_computes(bed):
    mine, theirs = pictures.read_back(bed)
    assert torch.equal(mine.positions, theirs.positions)
    assert kv_distance(mine.kv, theirs.kv) <= 1e-5


@pytest.mark.slow
def test_a_window_answers_from_what_two_workers_have_stored(bed):
    done = [pictures.engine_session(bed, number) for number in range(600, 605)]
    assert all(one.origins == pictures.ORIGINS for one in done)
    assert pictures.share([right for one in done for right in one.right]) >= 0.95
