"""Codes: bounded error, no bit wasted, nothing invented."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import LowRank, Patch, RopeSpec, attention_layout, factor, quantize, rotate_factors
from kamera.ops.quantize import coded_bytes
from tests.ops.coded import coded, coded_factors
from tests.ops.test_patch import matrix

LEVELS = {8: 127, 4: 7}
BITS = pytest.mark.parametrize("bits", [8, 4])


@given(
    st.integers(0, 9),
    st.integers(0, 7),
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.floats(-4, 4),
    st.integers(0, 1000),
)
def test_no_entry_is_off_by_more_than_half_a_step_of_its_column(rows, columns, bits, dtype, power, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator) * 10**power).to(dtype)
    codes = quantize(x, bits)
    assert codes.shape == x.shape
    assert codes.dense().shape == x.shape
    wide = x.double()
    half = wide.abs().amax(0) / LEVELS[bits] / 2 if rows else wide.new_zeros(columns)
    off = (wide - codes.dense().double()).abs()
    assert bool((off <= half * (1 + 1e-5) + 1e-30).all())
    assert codes.nbytes == coded_bytes(rows, columns, bits)


@BITS
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 9])
def test_a_truncation_is_a_prefix_of_columns(bits, columns):
    codes = quantize(matrix(6, 5), bits)
    cut = codes.truncate(columns)
    assert torch.equal(cut.dense(), codes.dense()[:, :columns])
    assert cut.nbytes == coded_bytes(6, min(columns, 5), bits)


@BITS
def test_coded_right_factors_turn_like_floats(bits):
    rope = RopeSpec((1.0, 0.3), (0, 1), 2, "half")
    channel = attention_layout(2, 4, 6, 4, rope).channel("k")
    packed = coded_factors(factor(matrix(7, channel.features), 3), bits)
    plain = LowRank(packed.left.dense(), packed.right.dense())
    turned, want = (rotate_factors(low, channel, (40, -3)) for low in (packed, plain))
    assert turned.left is packed.left  # only the right factor turns
    torch.testing.assert_close(turned.dense(), want.dense(), rtol=0, atol=1e-6)
    assert not torch.allclose(turned.dense(), packed.dense(), atol=1e-2)


@BITS
def test_coded_factors_do_what_factors_do(bits):
    low = factor(matrix(9, 12).float(), 5)
    packed = coded_factors(low, bits)
    assert packed.rank == 5
    assert packed.nbytes == coded_bytes(9, 5, bits) + coded_bytes(12, 5, bits)
    plain = LowRank(packed.left.dense(), packed.right.dense())
    torch.testing.assert_close(packed.dense(), plain.dense())
    torch.testing.assert_close(packed.truncate(2).dense(), plain.truncate(2).dense())
    patch = coded(Patch.of(({}, {"v": low})), bits)
    assert (patch.rank, patch.num_tokens) == (5, 9)
    assert patch.nbytes == packed.nbytes + (
        2 * 4 if bits == 4 else 0
    )  # a scale of the column that fills a pair
    assert torch.equal(patch.layers[1]["v"].dense(), packed.dense())
    assert torch.equal(LowRank.from_tensors(packed.tensors()).dense(), packed.dense())
