"""Mutated files: those whose digest fits are refused by name, or are exactly what is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import strategies as st

from benchmarks.reliability import rig
from tests.store.builders import encode

ODD = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2**53, 2**64, 10**400, 0.5, 1e308),
        *("", "k", "kv", "\ud800", ".."),
        *([], [0], ["k"], [[]], [["k", "k"]], {}, {"k": "v"}, {"k": ["left"]}),
    ]
).map(copy.deepcopy)  # they are changed in turn


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside ``value``."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        found += places(inner, (*path, name))
    return found


def changed(draw: st.DataObject, document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with some of its values replaced, removed, doubled under other names, or reordered."""
    document = copy.deepcopy(document)
    for _ in range(draw.draw(st.integers(1, 3))):
        ways = places(document)
        if not ways:
            break
        *way, last = draw.draw(st.sampled_from(ways))
        inner: Any = document
        for name in way:
            inner = inner[name]
        what = draw.draw(st.sampled_from(["replace", "remove", "add", "reverse"]))
        if what == "replace":
            inner[last] = draw.draw(ODD)
        elif what == "remove":
            del inner[last]
        elif what == "add" and isinstance(inner, dict):
            inner[draw.draw(st.text(max_size=5))] = draw.draw(ODD)
        elif what == "add":
            inner.append(draw.draw(ODD))
        elif isinstance(inner, list):
            inner.reverse()
        else:
            items = list(inner.items())
            inner.clear()
            inner.update(reversed(items))
    return document


@pytest.mark.parametrize(
    "slot, digest",
    [
        (0, "0e9f61d76a8248fc66d9456002e66ceef85e8d5b34262cf589cab36f70799db3"),
        (2, "34d8261632c487d72eaae6a81cd25e6418b2e9f8e73a8c9cd62203af8f1fd1e2"),
    ],
)
def test_the_file_of_a_record_stays_what_it_is(slot: int, digest: str) -> None:
    """Stores outlive versions, and a file that is laid out otherwise is refused."""
    assert encode(rig.record(slot, 7), 7)[35:99].decode() == digest
