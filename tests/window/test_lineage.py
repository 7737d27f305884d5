"""A patch formed behind survivors serves only where the survivors remember the same."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.store import StoreAdmin
from kamera.window import former_of
from tests.engines.compare import worst
from tests.models import samples
from tests.window.rig import FULL_RANK, guarantees, live, make, rig, watching

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def pieces():
    backbone, (a, b, c, d) = rig(FAMILY)
    return backbone, a, b, c, d, samples.chunk(backbone, samples.sample(FAMILY, 40), "x")


def slid(backbone, store, first, *others, **options) -> KameraWindow:
    """A window whose chunks remember ``first``, which has left."""
    window = make(backbone, store, first, *others, **options)
    window.slide()
    return window


def patches_of(window: KameraWindow, chunk) -> list:
    return [info for info in former_of(window).store.ls("exact") if info.chunk_id == chunk.id]


def test_a_patch_serves_no_window_of_other_survivors(pieces):
    """What it absorbed of ``a`` through the survivor never stood in the second window."""
    backbone, a, b, c, _, x = pieces
    store = former_of(slid(backbone, None, a, b)).store
    slid(backbone, store, a, b).append(c)
    window = slid(backbone, store, x, b)
    with watching(backbone) as seen:
        window.append(c)
    assert (seen.forwards, guarantees(window)) == (1, ["survivor", "patched"])
    alone = slid(backbone, None, x, b)
    alone.append(c)
    assert worst(live(window, 1), live(alone, 1)) <= 1e-5


def test_a_patch_serves_a_window_of_the_same_survivors(pieces):
    backbone, a, b, c, _, _ = pieces
    store = former_of(slid(backbone, None, a, b)).store
    slid(backbone, store, a, b).append(c)
    window = slid(backbone, store, a, b)
    with watching(backbone) as seen:
        window.append(c)
    assert (seen.forwards, guarantees(window)) == (0, ["survivor", "patched"])


def test_a_survivor_of_a_survivor_is_told_apart(pieces):
    """``c`` was never behind ``a`` itself: it knows of it through ``b``."""
    backbone, a, b, c, d, x = pieces
    store = ChunkStore.open("memory://")
    first, second = (
        slid(backbone, store, left, b, policy=ReusePolicy(rank=FULL_RANK, forms="always")) for left in (a, x)
    )
    for window in (first, second):
        window.append(c)
        window.slide()
    first.append(d)
    with watching(backbone) as seen:
        second.append(d)
    assert seen.forwards == 1


def test_the_lineage_comes_back_with_a_saved_window(pieces, tmp_path):
    backbone, a, b, c, _, x = pieces
    store = ChunkStore.open("memory://")
    slid(backbone, store, a, b).append(c)
    for first, forwards in ((a, 0), (x, 1)):
        slid(backbone, store, first, b).save(tmp_path / first.id)
        loaded = KameraWindow.load(tmp_path / first.id, backbone, store)
        with watching(backbone) as seen:
            loaded.append(c)
        assert seen.forwards == forwards


@pytest.mark.parametrize("which", ["what left", "the survivor"])
def test_forgetting_takes_what_survivors_passed_on(pieces, which):
    backbone, a, b, c, _, _ = pieces
    window = slid(backbone, None, a, b)
    window.append(c)
    assert len(patches_of(window, c)) == 1
    StoreAdmin(former_of(window).store).forget(a.id if which == "what left" else b.id)
    assert patches_of(window, c) == []
