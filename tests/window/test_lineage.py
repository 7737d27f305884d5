"""A patch formed behind survivors serves only where the survivors remember the same."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, KameraWindow
from kamera.window import former_of
from tests.engines.compare import worst
from tests.models import samples
from tests.window.rig import guarantees, live, make, pictures, rig, watching

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def pieces():
    backbone, (a, b, c, d) = rig(FAMILY)
    return backbone, a, b, c, d, samples.chunk(backbone, samples.sample(FAMILY, 40), "x")


def slid(backbone, store, first, *others, **options) -> KameraWindow:
    """A window whose chunks remember ``first``, which has left; one that is exact leads."""
    window = make(backbone, store, first, pictures(backbone, FAMILY, 9)[8], *others, **options)
    window.slide()
    return window


def test_a_patch_serves_no_window_of_other_survivors(pieces):
    """What it absorbed of ``a`` through the survivor never stood in the second window."""
    backbone, a, b, c, _, x = pieces
    store = former_of(slid(backbone, None, a, b)).store
    slid(backbone, store, a, b).append(c)
    window = slid(backbone, store, x, b)
    with watching(backbone) as seen:
        window.append(c)
    assert (seen.forwards, guarantees(window)) == (1, ["exact", "survivor", "patched"])
    alone = slid(backbone, None, x, b)
    alone.append(c)
    assert worst(live(window, 2), live(alone, 2)) <= 1e-5


def test_a_patch_serves_a_window_of_the_same_survivors(pieces):
    backbone, a, b, c, _, _ = pieces
    store = former_of(slid(backbone, None, a, b)).store
    slid(backbone, store, a, b).append(c)
    window = slid(backbone, store, a, b)
    with watching(backbone) as seen:
        window.append(c)
    assert (seen.forwards, guarantees(window)) == (0, ["exact", "survivor", "patched"])


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
