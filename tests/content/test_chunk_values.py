"""A chunk is a value: nothing written after it was made reaches what its id names."""

from __future__ import annotations

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.window import former_of, sequence_of
from tests.models import samples, tiny
from tests.window.rig import SYSTEM

FAMILY = "qwen2_5_vl"


def zero_pixels(chunk) -> None:
    chunk.inputs["pixel_values"].zero_()


def zero_pixels_through_numpy(chunk) -> None:
    chunk.inputs["pixel_values"].numpy()[:] = 0


def zero_pixels_without_a_trace(chunk) -> None:
    chunk.inputs["pixel_values"].data.zero_()


def other_ids(chunk) -> None:
    chunk.input_ids[:2] = 3


def other_grid(chunk) -> None:
    chunk.position_inputs()["image_grid_thw"][:] = torch.tensor([1, 2, 8])


WRITES = [zero_pixels, zero_pixels_through_numpy, zero_pixels_without_a_trace, other_ids, other_grid]


def archived(chunk, write=None, after=None):
    """The canonical that a window stores of ``chunk``."""
    store = ChunkStore.open("memory://")
    window = KameraWindow(tiny.backbone(FAMILY), store, SYSTEM)
    if write is not None:
        write(chunk)
    window.append(chunk)
    if after is not None:
        after(chunk)
    window.flush()
    record = store.get_canonical(former_of(window).context, chunk.id)
    return window, record


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
@pytest.mark.parametrize("moment", ["write", "after"])
def test_a_write_never_reaches_what_the_id_names(write, moment):
    backbone, given = tiny.backbone(FAMILY), samples.sample(FAMILY)
    _, true = archived(samples.chunk(backbone, given))
    window, stored = archived(samples.chunk(backbone, given), **{moment: write})
    assert torch.equal(stored.input_ids, true.input_ids)
    for name, tensor in true.inputs.items():
        assert torch.equal(stored.inputs[name], tensor)
    for mine, theirs in zip(stored.kv, true.kv, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert torch.equal(sequence_of(window).input_ids, torch.cat([SYSTEM, given.input_ids]))
