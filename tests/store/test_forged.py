"""Files whose digests fit, but whose headers disagree with themselves or with the tensors."""

from __future__ import annotations

from typing import Any

import pytest

from kamera.errors import CorruptChunk
from tests.store.builders import (
    CONTEXT,
    assert_same,
    canonical,
    coded_patch,
    decode,
    encode,
    join,
    patch,
    split,
)

HERE = "objects/aa/file"


def read(data: bytes, key: str) -> Any:
    return decode(data, key, HERE)


def forge(record: Any, **changes: Any) -> bytes:
    """The file of ``record`` with header fields changed (None removes) and a good digest."""
    outer, kamera, rest = split(encode(record, 7))
    for name, value in changes.items():
        kamera[name] = value
        if value is None:
            del kamera[name]
    return join(outer, kamera, rest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"factors": None}, "object"),
        ({"factors": [{}, {}]}, "missing"),
        ({"factors": [{}, {c: ["left", "right"] for c in "kvx"}]}, "missing"),
        (
            {"factors": [{}, {"k": ["left_codes", "right_codes", "right_scales"], "v": [], "x": []}]},
            "missing",
        ),
    ],
)
def test_a_header_that_lies_about_codes_is_damage(change: dict[str, Any], says: str) -> None:
    record = coded_patch()
    with pytest.raises(CorruptChunk, match=says):
        read(forge(record, **change), record.key)


FORGED = {
    "unknown kind": ({"kind": "near"}, "kind"),
    "patch kind": ({"kind": "exact"}, "key"),
    "no kind": ({"kind": None}, "kind"),
    "no context": ({"context": None}, "context"),
    "context of other fields": ({"context": {"fingerprint": "f"}}, "anchor"),
    "another chunk": ({"chunk_id": "other"}, "key"),
    "another tenant": ({"context": {**vars(CONTEXT), "tenant": "you"}}, "key"),
    "another key": ({"key": "0" * 64}, "key"),
    "chunk id is a number": ({"chunk_id": 5}, "header"),
    "no version": ({"format": None}, "format"),
    "version 0": ({"format": 0}, "version"),
    "version is true": ({"format": True}, "version"),
    "version is text": ({"format": "2"}, "version"),
    "no info": ({"info": None}, "info"),
    "info is a list": ({"info": []}, "info"),
    "wrong number of tokens": ({"tokens": 4}, "tokens"),
    "tokens as float": ({"tokens": 3.0}, "tokens"),
    "no digests": ({"digests": None}, "digests"),
    "digests that are none": ({"digests": []}, "digests"),
    "digests of no pieces": ({"digests": {"algorithm": "sha256", "pieces": []}}, "0 digests of"),
    "a field that is not known": ({"color": "red"}, "color"),
    "created is text": ({"created": "now"}, "created"),
    "created is far too much": ({"created": 10**400}, "created"),
    "a block that has no tensors": ({"channels": [["k", "v"], ["k"]]}, "kv/1/k"),
    "a channel less": ({"channels": [["k"], []]}, "kv/0/v"),
    "a block less": ({"channels": [["k", "v"]]}, "1 blocks for 2 groups"),
    "channels that are none": ({"channels": 5}, "int"),
    "channels as text": ({"channels": ["kv", ""]}, "channels"),
    "no groups": ({"groups": None}, "groups"),
    "groups that are none": ({"groups": 5}, "5 are not groups"),
    "groups as text": ({"groups": "01"}, "are not groups"),
    "groups as floats": ({"groups": [[0.0], [1]]}, "are not groups"),
    "groups as truth": ({"groups": [[False], [True]]}, "are not groups"),
    "a layer in two groups": ({"groups": [[0], [0]]}, "are not groups"),
    "a layer in none": ({"groups": [[0], [2]]}, "are not groups"),
    "an empty group": ({"groups": [[0], [], [1]]}, "are not groups"),
    "a group out of order": ({"groups": [[1, 0], [2]]}, "are not groups"),
    "a group of more layers": ({"groups": [[0, 2], [1]]}, "layer 0 channel 'k' must be"),
    "an input less": ({"inputs": []}, "inputs/image_grid_thw"),
    "an input more": ({"inputs": ["image_grid_thw", "x"]}, "inputs/x"),
}


@pytest.mark.parametrize("changes, says", FORGED.values(), ids=FORGED)
def test_a_header_that_disagrees_is_refused(changes: dict[str, Any], says: str) -> None:
    record = canonical()
    assert_same(read(forge(record), record.key), record)  # the forge itself is sound
    with pytest.raises(CorruptChunk, match=says) as caught:
        read(forge(record, **changes), record.key)
    assert HERE in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        *({"rank": 3}, {"rank": None}, {"rank": -1}, {"formed": 5}, {"groups": [[0], [1, 2]]}, {"ranks": 5}),
        *({"ranks": [{}]}, {"ranks": [{}, {}]}, {"ranks": [{}, {"v": []}]}, {"ranks": [{}, {"v": 2}]}),
        *({"ranks": [{}, {"v": [number]}]} for number in (1, 3, 2.0, True, "2", None)),
        *({"ranks": [{}, {"v": ranks}]} for ranks in ([1, 1], [3, -1])),
    ],
)
def test_a_patch_header_that_lies_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptChunk):
        read(forge(patch(), **changes), patch().key)


def tampered_tensor(name: str, **changes: Any) -> bytes:
    outer, kamera, rest = split(encode(canonical(), 7))
    outer[name] = {**outer[name], **changes}
    return join(outer, kamera, rest)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("kv/0/k", {"shape": [1, 3, 2, 4]}),
        ("kv/0/k", {"shape": [24]}),
        ("kv/0/k", {"shape": [2, 3, 4]}),
        ("kv/0/k", {"shape": [1, 2, 3, 5]}),
        ("kv/0/k", {"shape": [2, 1, 3, 4]}),
        ("kv/0/k", {"dtype": "F4"}),
        ("kv/0/k", {"dtype": "X9"}),
        ("kv/0/k", {"data_offsets": [0, 2**62]}),
        ("kv/0/k", {"data_offsets": [-1, 8]}),
        ("positions", {"shape": [9]}),
        ("positions", {"shape": [1, 9]}),
        ("input_ids", {"dtype": "F64"}),
        ("input_ids", {"shape": [3, 1]}),
    ],
)
def test_tensor_entries_that_disagree_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptChunk, match=HERE):
        read(tampered_tensor(name, **changes), canonical().key)


@pytest.mark.parametrize(
    "change",
    [
        lambda digests: digests["pieces"].pop(),
        lambda digests: digests["pieces"].append("0" * 64),
        lambda digests: digests.update({"pieces": ["0" * 63]}),
        lambda digests: digests.update({"pieces": [5]}),
        lambda digests: digests.update({"pieces": {"0" * 64: 0}}),
        lambda digests: digests.update({"more": 1}),
        lambda digests: digests.pop("algorithm"),
    ],
)
def test_digests_of_other_pieces_than_there_are_are_refused(change: Any) -> None:
    outer, header, rest = split(encode(canonical(), 7))
    change(header["digests"])
    with pytest.raises(CorruptChunk, match=HERE):
        read(join(outer, header, rest), canonical().key)
