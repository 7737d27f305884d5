"""Turning keys, against an explicit loop over pairs in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import RopeSpec, relocate, uniform_offset

FREQUENCIES = tuple(10_000.0 ** (-i / 8) for i in range(8))
AXES = {
    "one_axis": (0,) * 8,
    "mrope_blocked": (0, 0, 1, 1, 1, 2, 2, 2),
    "mrope_interleaved": (0, 1, 2, 0, 1, 2, 0, 0),
    "ernie": (1, 2, 1, 2, 1, 2, 0, 0),
}
OFFSETS = {1: [(1000,), (-37,), (1,)], 3: [(1000, 1000, 1000), (1000, 0, 0), (500, 7, -11)]}


def spec(axes: str = "one_axis", pairing: str = "half", scaling: float = 1.0) -> RopeSpec:
    order = AXES[axes]
    return RopeSpec(FREQUENCIES, order, max(order) + 1 if max(order) else 1, pairing, scaling)


def keys(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned_by_hand(x: torch.Tensor, rope: RopeSpec, position, start: int = 0) -> torch.Tensor:
    """Rotate every pair of every token by its angle, one complex product at a time."""
    out = x.double().clone()
    pairs = len(rope.inv_freq)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1])).reshape(-1, x.dim() - 1):
        row = out[tuple(index)]
        for i in range(pairs):
            a, b = (i, i + pairs) if rope.pairing == "half" else (2 * i, 2 * i + 1)
            z = complex(float(row[start + a]), float(row[start + b]))
            angle = position[rope.axes[i]] * rope.inv_freq[i]
            z *= complex(math.cos(angle), math.sin(angle))
            row[start + a], row[start + b] = z.real, z.imag
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("tail", [0, 6])
def test_relocate_turns_pairs_by_axis_and_copies_the_rest(axes, pairing, start, tail):
    rope = spec(axes, pairing)
    x = keys(2, 3, start + 16 + tail)
    for offset in OFFSETS[rope.num_axes]:
        got = relocate(x, rope, offset, rotary_start=start)
        torch.testing.assert_close(got, turned_by_hand(x, rope, offset, start), rtol=0, atol=1e-12)
        assert torch.equal(got[..., :start], x[..., :start])
        assert torch.equal(got[..., start + 16 :], x[..., start + 16 :])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_relocate_rounds_once_even_at_long_range(dtype, bound):
    x = keys(2, 5, 16, dtype=dtype)
    for offset in (1000, 120_000, -1_000_000):
        got, want = relocate(x, spec(), (offset,)), turned_by_hand(x, spec(), (offset,))
        assert got.dtype == dtype
        assert float((got.double() - want).norm() / want.norm()) <= bound


@given(st.tuples(*[st.integers(-5000, 5000)] * 3), st.tuples(*[st.integers(-5000, 5000)] * 3))
def test_two_moves_equal_the_one_move_of_their_sum(first, second):
    x, rope = keys(1, 3, 16), spec("mrope_interleaved", "interleaved")
    both = relocate(relocate(x, rope, first), rope, second)
    once = relocate(x, rope, [a + b for a, b in zip(first, second, strict=True)])
    torch.testing.assert_close(both, once, rtol=0, atol=1e-11)


@given(st.integers(-100_000, 100_000))
def test_a_move_and_its_inverse_restore_the_keys(offset):
    x = keys(1, 3, 16)
    back = relocate(relocate(x, spec(), (offset,)), spec(), (-offset,))
    torch.testing.assert_close(back, x, rtol=0, atol=1e-11)


def test_relocate_leaves_its_input_as_it_was():
    x = keys(1, 3, 20)
    before = x.clone()
    relocate(x, spec(), (3,), rotary_start=2)
    assert torch.equal(x, before)


def test_moves_from_the_canonical_are_exact_and_repeats_drift():
    canonical = keys(2, 64, 16, dtype=torch.bfloat16)
    walk = [17 * i for i in range(1, 65)]
    chained = canonical
    for previous, place in zip([0, *walk], walk, strict=False):
        served = relocate(canonical, spec(), (place,))
        chained = relocate(chained, spec(), (place - previous,))
    assert torch.equal(served, relocate(canonical, spec(), (walk[-1],)))
    want = turned_by_hand(canonical, spec(), (walk[-1],))
    error = [float((t.double() - want).norm() / want.norm()) for t in (served, chained)]
    assert error[0] < 3e-3
    assert error[1] > 5 * error[0]


def test_attention_scaling_is_not_applied_a_second_time():
    x = keys(1, 3, 16)
    moved = relocate(x, spec(scaling=1.21), (40,))
    assert torch.equal(moved, relocate(x, spec(), (40,)))
    torch.testing.assert_close(moved.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeSpec((1.0, 0.5), (0,), 1, "half"), "one axis per frequency"),
        (lambda: RopeSpec((1.0,), (1,), 1, "half"), "are not in 0..0"),
        (lambda: RopeSpec((1.0,), (0,), 1, "quarter"), "neither 'half' nor 'interleaved'"),
        (lambda: spec("mrope_blocked").angles((1,)), "has 1 axes, the phase has 3"),
        (lambda: relocate(keys(1, 2, 15), spec(), (1,)), "15 features, the phase needs 0..16"),
        (lambda: relocate(keys(1, 2, 17), spec(), (1,), rotary_start=2), "needs 2..18"),
    ],
)
def test_a_phase_that_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_uniform_offset_is_the_step_of_every_axis():
    old = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 1, 3]])
    step = torch.tensor([[500], [7], [-11]])
    assert uniform_offset(old, old + step) == (500, 7, -11)
    assert uniform_offset(old, old) == (0, 0, 0)


def test_tokens_with_different_offsets_have_no_uniform_offset():
    old = torch.tensor([[0, 1, 2, 3]])
    for token in range(4):
        new = old + 5
        new[0, token] += 1
        assert uniform_offset(old, new) is None


def test_no_tokens_move_by_zero_and_unequal_shapes_are_refused():
    assert uniform_offset(torch.zeros(3, 0), torch.zeros(3, 0)) == (0, 0, 0)
    with pytest.raises(ValueError, match="differ in shape"):
        uniform_offset(torch.zeros(1, 3), torch.zeros(1, 4))
