from __future__ import annotations

from typing import Any

import pytest

from kamera.store import parse_size
from kamera.store.format import Codec
from kamera.store.memory import Memory
from tests.store.builders import canonical


def record(name: str) -> tuple[Any, Any]:
    one = canonical(name)
    return one, Codec().describe(one, 1.0, one.nbytes)


SIZE = canonical().nbytes
A, B, C = record("a"), record("b"), record("c")


def test_the_byte_limit_evicts_the_least_recently_used() -> None:
    tier = Memory(2 * SIZE)
    tier.put(*A)
    tier.put(*B)
    assert tier.get(A[1].key) is A[0]
    tier.put(*C)
    assert tier.stats().bytes == 2 * SIZE
    assert tier.stats().evictions == 1
    assert tier.get(B[1].key) is None
    assert tier.get(A[1].key) is A[0] and tier.get(C[1].key) is C[0]


def test_a_record_above_the_limit_evicts_nothing() -> None:
    tier = Memory(SIZE)
    tier.put(*A)
    large = canonical("large", tokens=9)
    tier.put(large, Codec().describe(large, 1.0, large.nbytes))
    assert tier.get(large.key) is None
    assert tier.get(A[1].key) is A[0]
    assert tier.stats().evictions == 0


@pytest.mark.parametrize(
    "text, size",
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("512MiB", 512 * 2**20),
        ("4GiB", 4 * 2**30),
        ("1GB", 10**9),
        ("1.5 KiB", 1536),
        ("7 B", 7),
    ],
)
def test_sizes_are_parsed(text: int | str, size: int) -> None:
    assert parse_size(text) == size
