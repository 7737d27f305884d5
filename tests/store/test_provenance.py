"""A patch that was formed behind stronger KV stays: nothing formed behind weaker KV takes its place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kamera.errors import RemoteUnavailable
from kamera.store import ChunkStore
from kamera.trust import GUARANTEES
from tests.store.builders import CHUNK, CONTEXT, assert_same, patch

KINDS = ("memory", "directory", "sealed", "remote", "cached")


def opened(kind: str, folder, mine: str = "mine") -> ChunkStore:
    """A store of a kind; those of one ``folder`` share their objects, but for memory."""
    far = f"obstore+file://{folder / 'far'}"
    if kind == "memory":
        return ChunkStore.open("memory://")
    if kind == "remote":
        return ChunkStore.open(far)
    if kind == "cached":
        return ChunkStore.open(far, cache=folder / mine)
    sealed = {"secret": b"s" * 32, "keys": [b"k" * 32]} if kind == "sealed" else {}
    return ChunkStore.open(folder / "here", **sealed)


@pytest.fixture(params=KINDS)
def store(request, tmp_path) -> Iterator[ChunkStore]:
    with opened(request.param, tmp_path) as one:
        yield one


def formed(store: ChunkStore) -> str:
    """Behind what the stored patch was formed: by its row, which is that of the object."""
    row = store.info(CONTEXT, CHUNK, ["x", "y"])
    record = store.get_patch(CONTEXT, CHUNK, ["x", "y"])
    assert row is not None and record is not None
    assert row.formed == record.formed
    return record.formed


@pytest.mark.parametrize(("first", "second"), itertools.permutations(["exact", "patched", "survivor"], 2))
def test_the_stronger_of_two_patches_is_kept_in_either_order(store, first, second):
    one, other = patch(formed=first, seed=1), patch(formed=second, seed=2)
    assert store.put(one) == store.put(other)
    stronger = min(one, other, key=lambda record: GUARANTEES.index(record.formed))
    assert formed(store) == stronger.formed
    assert_same(store.get_patch(CONTEXT, CHUNK, ["x", "y"]), stronger)


@pytest.mark.parametrize("kind", ["directory", "sealed", "remote", "cached"])
def test_two_stores_on_one_place_keep_the_stronger(kind, tmp_path):
    with opened(kind, tmp_path, "mine") as mine, opened(kind, tmp_path, "theirs") as theirs:
        assert mine.info(CONTEXT, CHUNK, ["x", "y"]) is None
        theirs.put(patch(formed="exact", seed=1))
        theirs.flush()
        mine.put(patch(formed="patched", seed=2))
        mine.flush()
        assert (formed(mine), formed(theirs)) == ("exact", "exact")
    with opened(kind, tmp_path, "others") as others:
        assert formed(others) == "exact"


@pytest.mark.parametrize("kind", ["remote", "cached"])
def test_an_upload_that_comes_late_replaces_nothing_stronger(kind, tmp_path, monkeypatch):
    with opened(kind, tmp_path, "mine") as mine, opened(kind, tmp_path, "theirs") as theirs:

        def down(*given):
            raise RemoteUnavailable("the wire is cut")

        with monkeypatch.context() as cut:
            for call in ("put", "info", "read"):
                cut.setattr(mine._tiers.remote, call, down)
            mine.put(patch(formed="patched", seed=2))
            assert formed(mine) == "patched"
            theirs.put(patch(formed="exact", seed=1))
            assert theirs.flush().unsaved == ()
        assert mine.flush().unsaved == ()
        assert formed(mine) == "exact"
    with opened(kind, tmp_path, "others") as others:
        assert formed(others) == "exact"
