"""Pins and the bounds of a directory: nothing pinned leaves, and the limit holds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import StoreFull
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.pins import PinBook
from tests.store.builders import CONTEXT, canonical, file_of, patch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("objects/*"))


# -- pins against the collector --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["canonical", "a patch of it"])
def test_gc_takes_nothing_that_was_pinned_after_it_had_chosen(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with ChunkStore.open(root) as store, ChunkStore.open(root) as other:
        keys = [store.put(canonical(name * 64)) for name in "abcd"]
        fixed = store.put(patch("d" * 64))
        weigh = store._disk.index.weigh  # type: ignore[union-attr]

        def overtaken(tenant: str | None) -> list[Any]:
            found = list(weigh(tenant))
            chosen.set()
            assert pinned.wait(300)
            return found

        chosen, pinned = threading.Event(), threading.Event()
        monkeypatch.setattr(store._disk.index, "weigh", overtaken)  # type: ignore[union-attr]
        choose_first = PinBook.names_to_keep

        def kept(self: PinBook) -> set[str]:
            found = choose_first(self)
            if not chosen.is_set():
                return found
            if not seen:
                seen.append(True)
                StoreAdmin(other).pin(
                    [keys[3] if kind == "canonical" else fixed]
                )  # behind the look, before the choice
            return found

        seen: list[bool] = []
        monkeypatch.setattr(PinBook, "names_to_keep", kept)
        pinned.set()
        removed = {gone.key for gone in StoreAdmin(store).gc(0).removed}
        monkeypatch.undo()
        assert keys[3] not in removed and removed >= set(keys[:3])
        assert store.has(CONTEXT, "d" * 64)
        assert (fixed in removed) == (kind == "canonical")


# -- a limit that holds ----------------------------------------------------------------------------


def test_pinned_objects_and_their_canonicals_stay_within_a_limit(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical("a" * 64))
        fixed = store.put(patch("a" * 64))
        store.put(canonical("b" * 64))
        loose = store.put(patch("b" * 64))
        total = on_disk(root)
        StoreAdmin(store).pin([fixed])
    with ChunkStore.open(root, disk_limit=total) as store:
        store.put(canonical("c" * 64))
        assert store.has(CONTEXT, "a" * 64, ("x", "y")) and store.has(CONTEXT, "a" * 64)
        assert not store.has(CONTEXT, "b" * 64)
        assert loose not in {info.key for info in store.ls()}  # of no use without its canonical
    small = file_of(root, fixed).stat().st_size + 10
    with ChunkStore.open(root, disk_limit=small) as store:
        before = on_disk(root)
        with pytest.raises(StoreFull, match="disk_limit"):
            store.put(canonical("d" * 64))
        assert on_disk(root) <= before and not store.has(CONTEXT, "d" * 64)
        assert store.has(CONTEXT, "a" * 64, ("x", "y"))
