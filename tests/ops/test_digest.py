"""Content identity: what counts, and what does not."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops.digest import chunk_id, digest, tensor_digest


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_fields_are_told_apart_wherever_their_borders_lie(a, b):
    assert (digest("d", *a) == digest("d", *b)) == (a == b)


def test_domains_are_told_apart_and_text_is_its_utf8():
    assert digest("a", "x") != digest("b", "x")
    assert digest("a", "é") == digest("a", "é".encode())
    assert len(bytes.fromhex(digest("a"))) == 32


def test_a_tensor_is_its_dtype_shape_and_bytes():
    base = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    flipped = base.clone()
    flipped[2, 3] ^= 1
    different = [base, flipped, base.view(torch.float32), base.reshape(4, 3), base.long(), base[:2], base.T]
    for a, b in itertools.combinations(different, 2):
        assert tensor_digest(a) != tensor_digest(b)


def test_the_sign_of_zero_and_the_payload_of_nan_count():
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.tensor([float("nan")])) == tensor_digest(torch.tensor([float("nan")]))


def test_a_chunk_id_covers_tokens_and_inputs_in_any_order():
    ids, a, b = torch.tensor([1, 2, 3]), torch.zeros(2), torch.ones(2)
    base = chunk_id(ids, {"a": a, "b": b})
    assert base == chunk_id(ids.int(), {"b": b, "a": a})
    others = [
        chunk_id(torch.tensor([1, 3, 2]), {"a": a, "b": b}),
        chunk_id(ids, {"a": b, "b": a}),
        chunk_id(ids, {"a": a}),
        chunk_id(ids, {"a": a, "c": b}),
        chunk_id(ids, {"a": a.bfloat16(), "b": b}),
        chunk_id(ids, {}),
    ]
    assert len({base, *others}) == 1 + len(others)
