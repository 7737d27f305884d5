"""Models whose pictures see their own later tokens: no two of them touch across a chunk border."""

from __future__ import annotations

import pytest
import torch

from kamera.errors import IncompatibleChunk
from kamera.window import former_of
from tests.models import samples, tiny
from tests.window.rig import Snapshot, inventory, is_a_reprefill, make

FAMILIES = ["gemma3", "gemma4_vl"]


def bare(family: str, seed: int, before: int = 0, behind: int = 0):
    """A picture with so many text tokens around it, and no wrapper."""
    inputs = samples.sample(family, seed).vision_inputs
    ids = [samples.text_ids(before, seed), torch.full((4,), tiny.IMAGE), samples.text_ids(behind, seed + 1)]
    return tiny.backbone(family).chunk_from_tensors(torch.cat(ids), **inputs)


def assert_refused(window, call) -> None:
    before, held = Snapshot.of(window), inventory(former_of(window).store)
    with pytest.raises(IncompatibleChunk, match=r"begins with a picture.*takes for one") as caught:
        call()
    assert before.matches(window)
    assert inventory(former_of(window).store) == held
    assert "\n" not in str(caught.value)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", [(0, 0), (2, 0)])
def test_touching_pictures_are_refused_on_arrival(family, text):
    backbone = tiny.backbone(family)
    window = make(backbone, None, bare(family, 0, *text))
    assert_refused(window, lambda: window.append(bare(family, 1, 0, 3)))
    stored = bare(family, 2)
    make(backbone, former_of(window).store, stored)
    assert_refused(window, lambda: window.append(stored))
    assert_refused(window, lambda: window.recall(stored.id))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_edit_brings_pictures_together(family):
    backbone = tiny.backbone(family)
    text = backbone.chunk_from_tensors(samples.text_ids(5))
    window = make(backbone, None, bare(family, 0), text, bare(family, 1))
    assert_refused(window, lambda: window.evict(1))
    assert_refused(window, lambda: window.reorder([0, 2, 1]))
    window.reorder([2, 1, 0])
    window.slide(2)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_with_text_between_are_exact(family):
    backbone = tiny.backbone(family)
    chunks = [bare(family, 0, 0, 1), bare(family, 1), bare(family, 2, 1, 0)]
    window = make(backbone, None, *chunks)
    assert [s.guarantee for s in window.slots] == ["exact"] * 3
    assert is_a_reprefill(window, chunks)


def test_pictures_that_see_only_what_is_before_may_touch():
    """LLaVA attends causally: what touches is exact."""
    chunks = [
        tiny.backbone("llava").chunk_from_tensors(
            torch.full((16,), tiny.IMAGE), **samples.sample("llava", seed).vision_inputs
        )
        for seed in (0, 1)
    ]
    window = make(tiny.backbone("llava"), None, *chunks)
    assert is_a_reprefill(window, chunks)
