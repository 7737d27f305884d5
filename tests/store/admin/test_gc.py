"""What gc keeps: what is pinned, then what saves the most recompute per byte; and nothing half."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamera.store import ChunkStore, StoreAdmin
from kamera.store.admin.gc import collect
from kamera.store.disk.notes import HALF_LIFE
from kamera.store.eviction import choose
from kamera.store.info import Weighed
from kamera.store.pins import PinBook, PinCell
from tests.store.builders import CONTEXT, canonical, patch

NOW = 1e9


def weighed(key: str, kind: str = "canonical", chunk: str = "c", **fields: object) -> Weighed:
    base = Weighed(key, kind, chunk, "f", "a", "", "as-is", "", 100, 1000, NOW, "stamp")
    return base._replace(**fields)


@st.composite
def stores(draw: st.DrawFn) -> list[Weighed]:
    objects = []
    for chunk in range(draw(st.integers(0, 6))):
        kinds = draw(st.lists(st.sampled_from(("exact", "orbit")), max_size=4))
        if draw(st.integers(0, 5)):  # some patches have lost their canonical
            kinds.append("canonical")
        for i, kind in enumerate(kinds):
            used = draw(st.none() | st.floats(NOW - 1e7, NOW))
            objects.append(
                weighed(
                    f"{chunk}-{i}",
                    kind,
                    f"chunk{chunk}",
                    tokens=draw(st.integers(0, 500)),
                    bytes=draw(st.integers(1, 10_000)),
                    created=draw(st.floats(NOW - 1e8, NOW)),
                    uses=0.0 if used is None else draw(st.floats(0.01, 100)),
                    used=used,
                )
            )
    return objects


class Fake:
    """The tiers of a store of these objects."""

    remote = None

    def __init__(self, objects: list[Weighed], pinned: set[str]) -> None:
        self.disk = SimpleNamespace(index=self, remove_leftovers=lambda: 0)
        self.tiers_below_memory = [self.disk]
        self.pins = PinBook(PinCell())
        self.pins.pin([(name, 1) for name in pinned])
        self.gone: list[str] = []
        self._objects = objects

    def weigh(self, tenant: str | None) -> list[Weighed]:
        return self._objects

    def remove_unpinned(self, objects: Sequence[Weighed]) -> list[bool]:
        self.gone.extend(found.key for found in objects)
        return [True] * len(objects)


@given(stores(), st.data())
def test_the_rest_fits_or_is_pinned_and_no_patch_stands_alone(
    objects: list[Weighed], data: st.DataObject
) -> None:
    names = [found.key for found in objects]
    pinned = set(data.draw(st.lists(st.sampled_from(names), unique=True))) if names else set()
    budget = data.draw(st.integers(0, 60_000))
    held: Any = Fake(objects, pinned)
    report, gone = collect(held, None, budget), held.gone
    left = [found for found in objects if found.key not in gone]
    assert len(gone) == len(set(gone))
    assert pinned.isdisjoint(gone)
    homes = {found.chunk_id for found in left if found.kind == "canonical"}
    assert all(found.kind == "canonical" or found.chunk_id in homes or found.key in pinned for found in left)
    # what is left over budget is pinned, or the canonical of something pinned
    kept_for = {found.chunk_id for found in left if found.key in pinned}
    free = [f for f in left if f.key not in pinned and (f.kind != "canonical" or f.chunk_id not in kept_for)]
    assert sum(found.bytes for found in left) <= budget or not free
    assert report.bytes_before - report.bytes_after == sum(removed.bytes for removed in report.removed)
    assert report.bytes_after == sum(found.bytes for found in left)
    assert report.objects_after == len(left) and {removed.key for removed in report.removed} == set(gone)


@given(stores(), st.integers(0, 60_000))
def test_nothing_leaves_without_need(objects: list[Weighed], budget: int) -> None:
    victims = list(choose(objects, (), budget, NOW))
    needed = [victim for victim in victims if victim.reason != "its canonical is gone"]
    if needed:
        before_last = sum(f.bytes for f in objects) - sum(
            v.object.bytes for v in victims[: -len(last(needed))]
        )
        assert before_last > budget
    homes = {found.chunk_id for found in objects if found.kind == "canonical"}
    assert {v.object.key for v in victims if v not in needed} == {
        found.key for found in objects if found.chunk_id not in homes
    }


def last(victims: list) -> list:
    """The object, or canonical with its patches, that left last."""
    if victims[-1].object.kind != "canonical":
        return victims[-1:]
    # its patches left just before it; those that had left alone before are not told apart, so at most these
    chunk = victims[-1].object.chunk_id
    start = len(victims) - 1
    while start and victims[start - 1].object.chunk_id == chunk:
        start -= 1
    return victims[start:]


def test_what_is_used_stays_and_what_is_not_leaves() -> None:
    objects = [
        weighed("never", chunk="1"),
        weighed("long ago", chunk="2", uses=3.0, used=NOW - 20 * HALF_LIFE),
        weighed("once", chunk="3", uses=1.0, used=NOW),
        weighed("often", chunk="4", uses=9.0, used=NOW),
        weighed("old", chunk="5", created=NOW - HALF_LIFE),
    ]
    order = [v.object.key for v in choose(objects, (), 0, NOW)]
    assert order == ["old", "never", "long ago", "once", "often"]


# -- on a real store -------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_gc_removes_files_and_rows_and_says_so(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for name in "abcd":
            store.put(canonical(name * 64))
            store.put(patch(name * 64))
        for _ in range(3):
            assert store.get_canonical(CONTEXT, "b" * 64) is not None
            assert store.get_patch(CONTEXT, "b" * 64, ("x", "y")) is not None
        total = StoreAdmin(store).stats().bytes
        of_b = sum(info.bytes for info in store.ls(chunk_id="b" * 64))
        dry = StoreAdmin(store).gc(of_b, dry_run=True)
        assert (dry.bytes_before, dry.bytes_after) == (total, of_b)
        assert StoreAdmin(store).stats().bytes == total and StoreAdmin(store).verify().ok == 8
        done = StoreAdmin(store).gc(of_b)
        assert dataclasses.replace(done, removed=()) == dataclasses.replace(dry, removed=())
        assert [gone.key for gone in done.removed] == [gone.key for gone in dry.removed]
        assert {info.chunk_id for info in store.ls()} == {"b" * 64}
        assert StoreAdmin(store).stats().bytes == of_b
        assert len(list(root.glob("objects/*"))) == 2
        assert store.get_canonical(CONTEXT, "a" * 64) is None
        assert store.get_patch(CONTEXT, "b" * 64, ("x", "y")) is not None
