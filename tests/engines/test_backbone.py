"""A backbone is a front door: few names of its own, and the engine that everything else is given."""

from __future__ import annotations

import pytest
import torch

from kamera import Backbone, ChatSession, ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import Engine
from kamera.engines.hf import describe
from kamera.patches import later_of
from kamera.reuse import Reuser
from kamera.sessions import SessionPool
from kamera.window import former_of
from tests.models import tiny
from tests.sessions.rig import speaking

EXACT = ReusePolicy.exact()
MOST_NAMES = 12


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone(tiny.build("qwen2_5_vl"))


def public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_it_has_few_names_and_an_engine(backbone):
    names = public(backbone) - {"engine"}
    assert len(names) <= MOST_NAMES, ", ".join(sorted(names))
    assert {"from_pretrained", "describe", "chunk", "chunk_from_tensors"} <= names


def test_the_engine_has_the_whole_contract_and_is_its_own(backbone):
    assert public(Engine) - public(backbone.engine) == set()
    assert backbone.engine.engine is backbone.engine


def test_what_it_tells_is_what_its_engine_tells(backbone):
    engine = backbone.engine
    assert (backbone.fingerprint, backbone.no_reuse) == (engine.fingerprint, engine.facts.no_reuse)
    assert backbone.model is engine.model and backbone.processor is engine.processor
    assert backbone.describe() == describe(engine)
    ids = torch.arange(1, 9)
    chunk = backbone.chunk_from_tensors(ids, label="some")
    assert (chunk.id, chunk.label) == (engine.chunk_from_tensors(ids).id, "some")
    with backbone.measure() as work:
        engine.prefill([engine.encode(chunk)], [engine.positions([ids], [{}])])
    assert (work.forwards, work.tokens) == (1, 8)


def test_windows_of_a_backbone_and_of_its_engine_are_windows_of_one_model(backbone, tmp_path):
    chunk = backbone.chunk_from_tensors([5, 6, 7])
    store = ChunkStore.open("memory://")
    one, other = (KameraWindow(given, store, policy=EXACT) for given in (backbone, backbone.engine))
    one.append(chunk)
    one.save(tmp_path / "saved")
    loaded = KameraWindow.load(tmp_path / "saved", backbone, store)
    assert all(former_of(window).backbone is backbone.engine for window in (one, other, loaded))
    question = torch.tensor([3, 4])
    assert torch.equal(loaded.next_token_logits(question), one.next_token_logits(question))
    assert later_of(former_of(one).backbone) is later_of(backbone.engine)


def test_sessions_pools_and_reuse_take_a_backbone(tmp_path):
    engine = speaking("headers")
    backbone = Backbone(engine.model, engine.processor)
    store = ChunkStore.open("memory://")
    made = (
        ChatSession(backbone, store, policy=EXACT),
        SessionPool(backbone, store, policy=EXACT),
        Reuser(backbone, store, EXACT),
    )
    assert all(one.backbone is backbone.engine for one in made)
    made[0].send("Say something.", max_new_tokens=2)
    made[0].save(tmp_path / "session")
    again = ChatSession.load(tmp_path / "session", backbone, store)
    assert again.backbone is backbone.engine and again.messages == made[0].messages
