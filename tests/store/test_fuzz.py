"""Mutated files: those whose digest fits are refused by name, or are exactly what is written."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store import head
from lab.reliability import fuzz, parser, rig
from tests.store.builders import canonical, coded_patch, decode, encode, join, patch, seal, split

RECORDS = [canonical(), patch(), patch(kind="orbit"), coded_patch(4)]
ODD = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2**53, 2**64, 10**400, 0.5, 1e308),
        *("", "k", "kv", "\ud800", ".."),
        *([], [0], ["k"], [[]], [["k", "k"]], {}, {"k": "v"}, {"k": ["left"]}),
    ]
).map(copy.deepcopy)  # they are changed in turn


def read(data: bytes, key: str) -> Any | None:
    """The record, which must be what ``data`` says to the byte; None if it is refused by name."""
    try:
        found = decode(data, key, "here")
    except (CorruptChunk, StoreVersionError):
        return None
    _, header, _ = split(data)
    assert encode(found, header["created"]) == data
    assert found.key == key
    return found


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


def header_changed(draw: st.DataObject) -> tuple[bytes, Any] | None:
    """A record in bytes with its header changed, and the record; None where that is no JSON text."""
    record = draw.draw(st.sampled_from(RECORDS))
    outer, header, rest = split(encode(record, 7))
    header = changed(draw, header)
    try:
        data = join(outer, header, rest)
    except (ValueError, UnicodeEncodeError):
        return None
    return data, record


def entry_changed(draw: st.DataObject) -> tuple[bytes, Any] | None:
    """The same with the entries of its tensors, or its length, changed."""
    record = draw.draw(st.sampled_from(RECORDS))
    outer, header, rest = split(encode(record, 7))
    metadata = outer.pop("__metadata__")
    outer = changed(draw, outer)
    rest = rest[: draw.draw(st.sampled_from([len(rest), len(rest) - 1, 8, 0]))] + draw.draw(
        st.binary(max_size=2)
    )
    try:
        data = join({"__metadata__": metadata, **outer}, header, rest)
    except (ValueError, UnicodeEncodeError):
        return None
    return data, record


CHANGES = [header_changed, entry_changed]


TIMES = [150, pytest.param(4000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_in_any_place_is_refused_or_read_as_written(change: Any, times: int) -> None:
    @settings(max_examples=times)
    @given(st.data())
    def hold(draw: st.DataObject) -> None:
        made = change(draw)
        assert made is None or refused_or_read(*made)

    hold()


def refused_or_read(data: bytes, record: Any) -> bool:
    """True if a store reads nothing of these bytes, or all that the record holds."""
    found = read(data, record.key)
    return found is None or found.tensors().keys() == record.tensors().keys()


def test_two_texts_of_one_header_are_not_both_read() -> None:
    """Where parsers could differ: a name given twice, another order, other spaces, escapes."""
    data = encode(canonical(), 7)
    size = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + size].rstrip(), data[8 + size :]
    entry = json.dumps(json.loads(text)["positions"], separators=(",", ":")).encode()
    others = [
        text[:-1] + b',"positions":' + entry + b"}",
        text.replace(b'"positions":', b'"\\u0070ositions":'),
        text.replace(b'"shape":[3,3]', b'"shape":[3, 3]'),
        text.replace(b'"input_ids":', b' "input_ids":'),
        text + b" " * 800,
        text,
    ]
    for other in others:
        other += b" " * (-len(other) % 8) if other is not text else b""
        assert other != data[8 : 8 + size]
        bad = seal(len(other).to_bytes(8, "little") + other + rest)
        with pytest.raises(CorruptChunk):
            decode(bad, canonical().key, "here")


def test_tensors_that_swap_their_places_are_refused() -> None:
    outer, header, rest = split(encode(canonical(), 7))
    k, v = outer["kv/0/k"], outer["kv/0/v"]
    k["data_offsets"], v["data_offsets"] = v["data_offsets"], k["data_offsets"]
    with pytest.raises(CorruptChunk, match="laid out"):
        decode(join(outer, header, rest), canonical().key, "here")


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


def test_every_region_of_a_file_is_known() -> None:
    for slot in (0, 2):
        data = encode(rig.record(slot, 7), 1.5)
        parts = fuzz.regions(data)
        assert [start for _, start, _ in parts[1:]] == [end for _, _, end in parts[:-1]]
        assert (parts[0][1], parts[-1][2]) == (0, len(data))
        assert {"length", "digest", "header groups", "header digests"} <= {name for name, _, _ in parts}


def test_no_mutation_is_served() -> None:
    found = fuzz.run(1200, seed=1)
    assert (found["served"], found["differs"], found["other errors"]) == (0, 0, 0)
    assert found["mutations"] > 500 and found["sealed"] > 500 and found["through a store"] > 5
    assert found["regions touched"] == found["regions"]


def test_the_fuzzer_notices_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.hmac, "compare_digest", lambda one, other: True)
    found = fuzz.run(400, seed=1)
    assert found["served"] > 0


def test_what_atheris_finds_is_refused_or_read_as_written() -> None:
    pytest.importorskip("atheris")
    found = parser.run(1000, seed=1)
    assert (found["differs"], found["other errors"], found["crashes"]) == (0, 0, 0)
    assert found["inputs"] >= 1000 and found["refused"] > 500 and found["reads as written"] > 0


@pytest.mark.slow
def test_ten_thousand_mutations_are_not_served() -> None:
    found = fuzz.run(fuzz.SIZE, seed=2)
    assert found["mutations"] > 10_000
    assert (found["served"], found["differs"], found["other errors"]) == (0, 0, 0)
