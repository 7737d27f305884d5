"""Questions side by side in one forward equal questions one by one."""

from __future__ import annotations

import pytest
import torch

from kamera.engines.hf import HfEngine, forwards
from kamera.errors import UnsupportedBackbone
from lab.asking import ask_side_by_side
from tests.lab.scenes import FAMILIES, questions, scene_of


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_side_by_side_equals_one_by_one(family):
    scene = scene_of(family)
    backbone: HfEngine = scene.backbone
    asked = questions(5, 7, 5)
    places = [scene.question_positions(len(q)) for q in asked]

    def cache():
        return forwards.make_cache(backbone, [scene.context, scene.conditioned])

    together = ask_side_by_side(backbone, asked, places, cache())
    alone = torch.stack(
        [forwards.forward(backbone, q, p, cache()) for q, p in zip(asked, places, strict=True)]
    )
    assert torch.allclose(together, alone, atol=1e-4, rtol=1e-4)
    # what stands beside a question does not reach it
    other = ask_side_by_side(
        backbone, [*questions(9)[::-1], *asked[1:]], [scene.question_positions(9), *places[1:]], cache()
    )
    assert torch.allclose(together[1:], other[1:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


def test_layers_that_see_less_than_everything_are_refused(monkeypatch):
    scene = scene_of("qwen2_5_vl")
    backbone = scene.backbone
    (asked,) = questions(4)
    places, cache = [scene.question_positions(4)], forwards.make_cache(backbone, [scene.context])
    monkeypatch.setattr(backbone.config, "sliding_window", 16, raising=False)
    with pytest.raises(UnsupportedBackbone, match="forward_batch"):
        ask_side_by_side(backbone, [asked], places, cache)
