"""The bytes of a patch at any rank, from the sizes of its factors alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import LowRank, Patch, patch_bytes
from lab.coded import coded


def made(shapes: list[tuple[int, int]], dtype: torch.dtype) -> Patch:
    def factors(tokens: int, rank: int) -> LowRank:
        return LowRank(torch.randn(tokens, rank, dtype=dtype), torch.randn(7, rank, dtype=dtype))

    pairs = [(factors(*shape), factors(*shape).truncate(1)) for shape in shapes]
    return Patch.of(tuple({"k": keys, "v": values} for keys, values in pairs))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "8 bits", "4 bits", "mixed"])
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=4), rank=st.integers(1, 8))
def test_sizes_tell_the_bytes_of_a_truncated_patch(form, shapes, rank):
    patch = made(shapes, torch.bfloat16 if form == "bfloat16" else torch.float32)
    if form in ("8 bits", "4 bits"):
        patch = coded(patch, int(form[0]))
    if form == "mixed":
        patch = Patch.of((*patch.layers, *coded(patch, 4).layers))
    assert patch_bytes(patch.sizes, rank) == patch.truncate(rank).nbytes
    assert patch_bytes(patch.sizes, 99) == patch.nbytes
