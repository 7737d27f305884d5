"""Times to the first token: every arm is timed on the same turns, and the bare ones run the whole model."""

from __future__ import annotations

import json
import random

import pytest
import torch

from kamera.content import Conversations
from kamera.engines.hf import HfEngine
from lab.replay.scripts import screens
from lab.replay.shapes import enlarged, shaped
from lab.replay.ttft import ARMS, COMPARED, Bare, main


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return shaped("tiny", 2, torch.float32)


def _turns(count: int, side: int):
    return enlarged(list(screens(random.Random(0), count)), side)


def test_a_bare_run_without_a_cache_is_the_plain_model(backbone):
    conversations = Conversations(backbone.processor)
    (*_, messages) = _turns(2, 56)
    prompt = conversations.render(messages)
    found = Bare(backbone, conversations).answer(messages, prompt, 0)()
    wanted = backbone.plain.logits(conversations.whole(messages))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_pictures_whose_encodings_are_kept_are_not_encoded_and_give_the_same(backbone):
    conversations = Conversations(backbone.processor)
    (*_, messages) = _turns(3, 56)
    prompt = conversations.render(messages)
    *old, _ = [s.media for s in prompt.segments if s.media is not None]
    bare = Bare(backbone, conversations)
    lost, held = bare.answer(messages, prompt, 0), bare.answer(messages, prompt, 0, set(old))
    rows: list[int] = []
    tower = backbone.model.model.visual
    hook = tower.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[0]))
    wanted = lost()
    found = held()
    hook.remove()
    torch.testing.assert_close(found, wanted)
    assert rows[0] == 3 * rows[1] and len(rows) == 2, "three pictures, then the new one"


def test_a_picture_of_a_session_is_enlarged_once():
    first, second = _turns(2, 84)
    pictures = [[i["image"] for m in t[1:] for i in m["content"] if "image" in i] for t in (first, second)]
    assert pictures[0][0] is pictures[1][0] and pictures[1][1].size == (84, 84)


def test_a_shape_without_a_template_is_refused():
    with pytest.raises(ValueError, match=r"llava-1\.5-7b"):
        shaped("llava-1.5-7b", 2, torch.float32)


@pytest.mark.slow
def test_every_arm_is_timed_on_every_turn(tmp_path):
    where = tmp_path / "ttft.json"
    assert (
        main(["--preset", "tiny", "--side", "56", "--steps", "2", "--format", "json", "--output", str(where)])
        == 0
    )
    arms = json.loads(where.read_text())["results"]["3"]["arms"]
    assert tuple(arms) == ARMS
    for told in arms.values():
        assert len(told["seconds"]) == 2 and min(told["processor seconds"]) > 0
    for other in COMPARED:
        assert arms[other][f"of {other}"] == {"median": 1.0, "low": 1.0, "high": 1.0, "sum": 1.0}
