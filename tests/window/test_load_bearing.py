"""Would the answer change without this chunk? Held against two explicit windows."""

from __future__ import annotations

import pytest
import torch

from kamera import ReusePolicy
from kamera.window import former_of
from tests.models import samples, tiny
from tests.window.rig import GREEDY, QUESTION, Snapshot, inventory, make, rig, watching


def explicit(backbone, chunks, index, question, new: int) -> bool:
    """Whether the greedy answers of two freshly prefilled windows differ."""
    answers = []
    for held in (chunks, [c for i, c in enumerate(chunks) if i != index]):
        window = make(backbone, None, *held, policy=ReusePolicy(minimum="exact"))
        answers.append(window.generate(question, max_new_tokens=new, **GREEDY))
    return not torch.equal(*answers)


def sliding():
    """Three layers that see 8 tokens back: what is more than 21 tokens behind cannot bear anything."""
    backbone = tiny.backbone("mistral_sliding")
    return backbone, [backbone.chunk_from_tensors(samples.text_ids(12, seed)) for seed in range(4)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_pictures_bear_load_when_the_answer_without_them_differs(family):
    backbone, chunks = rig(family, count=3)
    window = make(backbone, None, *chunks)
    before = Snapshot.of(window)
    for index in range(len(chunks)):
        with watching(backbone) as seen:
            got = window.is_load_bearing(index, QUESTION, max_new_tokens=4)
        assert seen.encodes == 0
        assert got == explicit(backbone, chunks, index, QUESTION, 4)
    assert before.matches(window)


def test_an_unchanged_answer_costs_two_decodes():
    backbone, chunks = sliding()
    window = make(backbone, None, *chunks)
    held = inventory(former_of(window).store)
    question = samples.text_ids(30, 9)  # long enough that no chunk is in reach of its end
    with watching(backbone) as seen:
        assert not window.is_load_bearing(1, question, max_new_tokens=1)
    assert (seen.forwards, seen.tokens, seen.encodes) == (2, 60, 0)
    assert inventory(former_of(window).store) == held
