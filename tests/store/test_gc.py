"""What gc keeps: what is pinned and what that needs, then what was used last; and nothing half."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kamera.store import ChunkStore, StoreAdmin
from kamera.store.directory import leaving
from kamera.store.index import Row
from tests.store.builders import CONTEXT, canonical, patch

NOW = 1e9


def row(key: str, kind: str = "canonical", home: str = "", size: int = 1000, used: float = NOW) -> Row:
    return Row(key, kind, "c", "f", "a", "", "as-is", home, size, used, used)


@st.composite
def stores(draw: st.DrawFn) -> list[Row]:
    """Encodings, the canonicals of some, and their patches; here and there one that others need is gone."""
    rows = []
    for chunk in range(draw(st.integers(0, 6))):
        names = {"encoding": f"{chunk}-e", "canonical": f"{chunk}-c"}
        kinds = [kind for kind in names if draw(st.integers(0, 5))]
        kinds += draw(st.lists(st.sampled_from(("exact", "orbit")), max_size=4))
        for i, kind in enumerate(kinds):
            home = "" if kind == "encoding" else names["encoding" if kind == "canonical" else "canonical"]
            size, used = draw(st.integers(1, 10_000)), draw(st.floats(NOW - 1e7, NOW))
            rows.append(row(names.get(kind, f"{chunk}-{i}"), kind, home, size, used))
    return rows


@given(stores(), st.data())
def test_the_rest_fits_or_is_pinned_and_nothing_stands_without_what_it_needs(
    rows: list[Row], data: st.DataObject
) -> None:
    names = [one.key for one in rows]
    pinned = set(data.draw(st.lists(st.sampled_from(names), unique=True))) if names else set()
    budget = data.draw(st.integers(0, 60_000))
    gone = [one.key for one in leaving(rows, pinned, budget)]
    left = {one.key: one for one in rows if one.key not in gone}
    assert len(gone) == len(set(gone)) and pinned.isdisjoint(gone)
    for one in left.values():
        if one.kind in ("exact", "orbit") and one.key not in pinned:
            assert one.home in left
        assert one.home in left or one.home not in names, "it was there, and left before what needs it"
    kept = set(pinned)
    for _ in "ab":  # a patch needs its canonical, that its encoding
        kept |= {one.home for one in rows if one.key in kept}
    assert sum(one.bytes for one in left.values()) <= budget or left.keys() <= kept


@given(stores(), st.integers(0, 60_000))
def test_nothing_leaves_without_need(rows: list[Row], budget: int) -> None:
    names = {one.key for one in rows}
    orphans = {r.key for r in rows if r.kind in ("exact", "orbit") and r.home not in names}
    victims = list(leaving(rows, set(), budget))
    assert {one.key for one in leaving(rows, set(), None)} == orphans
    if len(victims) > len(orphans):
        assert sum(one.bytes for one in rows) - sum(one.bytes for one in victims[:-1]) > budget


def test_what_is_used_stays_and_a_use_of_a_patch_is_one_of_its_canonical() -> None:
    rows = [
        row("b", used=NOW - 2),
        row("a", used=NOW - 3),
        row("patch of c", "exact", "c", used=NOW),
        row("c", used=NOW - 9),
        row("e", "encoding", used=NOW - 9),
        row("d", home="e", used=NOW - 1),
    ]
    assert [one.key for one in leaving(rows, set(), 0)] == ["a", "b", "d", "e", "patch of c", "c"]
    assert [one.key for one in leaving(rows, {"patch of c", "d"}, 0)] == ["a", "b"]


def test_gc_removes_files_and_rows_and_says_so(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        admin = StoreAdmin(store)
        for name in "abcd":
            store.put(canonical(name * 64))
            store.put(patch(name * 64))
        assert store.get_canonical(CONTEXT, "b" * 64) is not None
        assert store.get_patch(CONTEXT, "b" * 64, ("x", "y")) is not None
        total = admin.stats().bytes
        of_b = sum(info.bytes for info in store.ls(chunk_id="b" * 64))
        dry = admin.gc(of_b, dry_run=True)
        assert (dry.bytes_before, dry.bytes_after) == (total, of_b)
        assert admin.stats().bytes == total and admin.verify().ok == 8
        done = admin.gc(of_b)
        assert dataclasses.replace(done, removed=()) == dataclasses.replace(dry, removed=())
        assert [gone.key for gone in done.removed] == [gone.key for gone in dry.removed]
        assert {info.chunk_id for info in store.ls()} == {"b" * 64}
        assert admin.stats().bytes == of_b
        assert len(list(tmp_path.glob("objects/*"))) == 2
        assert store.get_canonical(CONTEXT, "a" * 64) is None
        assert store.get_patch(CONTEXT, "b" * 64, ("x", "y")) is not None
