"""Codes: bounded error, no bit wasted, nothing invented."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import Codes, LowRank, Patch, RopeSpec, attention_layout, factor, quantize, rotate_factors
from kamera.ops.quantize import coded_bytes
from lab.coded import coded, coded_factors
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
def test_codes_of_codes_are_the_same(bits):
    codes = quantize(matrix(9, 5), bits)
    again = quantize(codes.dense(), bits)
    assert torch.equal(again.codes, codes.codes)
    torch.testing.assert_close(again.dense(), codes.dense(), rtol=1e-6, atol=0)


@BITS
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 9])
def test_a_truncation_is_a_prefix_of_columns(bits, columns):
    codes = quantize(matrix(6, 5), bits)
    cut = codes.truncate(columns)
    assert torch.equal(cut.dense(), codes.dense()[:, :columns])
    assert cut.nbytes == coded_bytes(6, min(columns, 5), bits)


def test_four_bits_take_half_the_bytes_of_eight():
    x = matrix(64, 8)
    eight, four = (quantize(x, bits) for bits in (8, 4))
    assert four.codes.numel() * 2 == eight.codes.numel() == 64 * 8
    assert (eight.bits, four.bits) == (8, 4)


@BITS
def test_a_column_of_zeros_stays_zero_between_its_neighbours(bits):
    x = matrix(6, 4)
    x[:, 1] = 0
    codes = quantize(x, bits)
    assert not codes.dense()[:, 1].any()
    alone = quantize(x[:, 2:3], bits)
    assert torch.equal(codes.dense()[:, 2:3], alone.dense())


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantize(torch.zeros(3)), r"\[rows, columns\], got \(3,\)"),
        (lambda: quantize(torch.zeros(3, 3), 2), r"bits 2 is none of \[4, 8\]"),
        (lambda: quantize(torch.tensor([[1.0], [float("nan")]])), "not finite"),
        (lambda: quantize(torch.tensor([[1.0, float("inf")]])), "not finite"),
        (lambda: Codes(torch.zeros(3, 2), torch.zeros(2)), "must be int8"),
        (lambda: Codes(torch.zeros(3, 2, dtype=torch.int8), torch.zeros(3)), r"int8 \[rows, 3\]"),
        (lambda: Codes(torch.zeros(3, 2, dtype=torch.uint8), torch.zeros(2)), "codes of 2 columns"),
        (lambda: Codes(torch.zeros(3, 2, dtype=torch.int8), torch.zeros(2).double()), "scales must be"),
        (lambda: LowRank.from_tensors({"left": torch.zeros(3, 1)}), "right"),
    ],
)
def test_what_is_no_code_is_refused(make, message):
    with pytest.raises((ValueError, KeyError), match=message):
        make()
