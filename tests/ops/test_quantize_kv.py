"""A KV in codes: every value within half a step, nothing invented, and the loss that is told is the loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import CodedKV, code_kv, kv_bytes, kv_map, kv_of
from kamera.ops.quantize import GRIDS, KV_CODECS, Grid, Loss, axis_of, code_channel

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CODECS = pytest.mark.parametrize("codec", KV_CODECS)


def values(heads: int, tokens: int, dim: int, dtype: torch.dtype, power: float = 0.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, tokens, dim, generator=generator) * 10**power
    if dim:
        x[:, :, 0] += 30 * 10**power  # a channel that is large at every token
    return x.to(dtype)


def groups_of(x: torch.Tensor, axis: str, group: int):
    """Every group of ``x`` by its place, slowly: (head, token or feature, its slice of the axis)."""
    heads, tokens, dim = x.shape
    length = tokens if axis == "tokens" else dim
    size = group or max(length, 1)
    for head in range(heads):
        for other in range(dim if axis == "tokens" else tokens):
            for start in range(0, length, size):
                part = slice(start, start + size)
                yield (head, part, other) if axis == "tokens" else (head, other, part)


@given(
    st.integers(1, 2),
    st.sampled_from([0, 1, 2, 3, 31, 32, 33, 65]),
    st.sampled_from([1, 2, 5, 32, 33]),
    st.sampled_from(FLOATS),
    st.sampled_from(["tokens", "features"]),
    st.sampled_from([Grid(8, 0), Grid(4, 32), Grid(4, 3), Grid(8, 7)]),
    st.floats(-6, 3),
    st.integers(0, 1000),
)
def test_no_value_is_off_by_more_than_half_a_step_of_its_group(
    heads, tokens, dim, dtype, axis, grid, power, seed
):
    x = values(heads, tokens, dim, dtype, power, seed)
    coded = code_channel(x, axis, grid)
    back = coded.dense()
    assert (back.dtype, back.shape, coded.shape) == (dtype, x.shape, tuple(x.shape))
    places = list(groups_of(x, axis, grid.group))
    assert coded.steps.numel() == coded.lows.numel() == len(places)
    wide, served = x.double(), back.double()
    # what the dtype itself cannot tell apart is no error of the codes
    rounding = torch.finfo(dtype).eps * wide.abs() + torch.finfo(dtype).tiny
    for place in places:
        group = wide[place]
        step = float(group.max() - group.min()) / grid.levels * (1 + torch.finfo(dtype).eps)
        step += torch.finfo(dtype).tiny
        off = (served[place] - group).abs() - rounding[place] * 2
        assert float(off.max()) <= step / 2 * (1 + 1e-4), place


def test_keys_are_grouped_per_channel_and_values_per_token():
    """So a channel that is large at every token costs its neighbours nothing where keys are concerned."""
    assert [axis_of(n) for n in ("k", "k_pe", "k_idx", "v", "c_kv")] == 3 * ["tokens"] + 2 * ["features"]
    x = values(2, 40, 8, torch.float32)
    coded = code_kv(kv_of([{"k": x, "v": x}]), "int8")
    assert coded.codes[0]["k"].steps.shape == (2, 1, 8)
    assert coded.codes[0]["v"].steps.shape == (2, 40, 1)
    assert coded.loss.channels["k"] < coded.loss.channels["v"] / 3


@CODECS
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_loss_told_is_the_loss(codec, dtype):
    kv = kv_of(
        [{"k": values(2, 37, 6, dtype, seed=i), "v": values(2, 37, 6, dtype, seed=9 + i)} for i in range(3)]
    )
    coded = code_kv(kv, codec)
    pairs = {n: [(a[n].double(), b[n].double()) for a, b in zip(kv, coded, strict=True)] for n in "kv"}
    for name, both in pairs.items():
        off = math.sqrt(sum(float((a - b).square().sum()) for a, b in both))
        norm = math.sqrt(sum(float(a.square().sum()) for a, _ in both))
        assert coded.loss.channels[name] == pytest.approx(off / norm, rel=1e-3)
    everything = [p for both in pairs.values() for p in both]
    off = math.sqrt(sum(float((a - b).square().sum()) for a, b in everything))
    norm = math.sqrt(sum(float(a.square().sum()) for a, _ in everything))
    assert coded.loss.relative == pytest.approx(off / norm, rel=1e-3)
    assert coded.loss.largest == pytest.approx(
        max(float((a - b).abs().max()) for a, b in everything), rel=1e-3
    )
    assert coded.loss.relative < {"int8": 0.01, "int4": 0.1}[codec]


@CODECS
def test_a_coded_kv_reads_as_a_kv_of_the_expected_bytes(codec):
    kv = kv_of([{"k": values(2, 64, 32, torch.bfloat16), "v": values(2, 64, 32, torch.bfloat16)}, {}])
    coded = code_kv(kv, codec)
    assert isinstance(coded, CodedKV) and len(coded) == 2
    assert [list(layer) for layer in coded] == [["k", "v"], []] == [list(layer) for layer in coded[0:2]]
    dense = kv_map(coded, lambda t: t)
    assert torch.equal(dense[0]["k"], coded[-2]["k"]) and dense[1] == {}
    values_held = 2 * 2 * 64 * 32
    steps = {"int8": 2 * (32 + 64), "int4": 2 * (2 * 32 + 64)}[codec]
    assert coded.nbytes == values_held * GRIDS[codec].bits // 8 + 2 * steps * 2
    assert coded.nbytes < kv_bytes(kv) * {"int8": 0.55, "int4": 0.32}[codec]


@CODECS
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_of_one_value_and_of_equal_values_are_exact(codec, dtype):
    one = values(2, 1, 1, dtype)
    same = torch.full((2, 40, 40), 3.14159).to(dtype)
    zeros = torch.zeros(1, 3, 3, dtype=dtype)
    for x in (one, same, zeros, values(1, 1, 4, dtype)):
        assert torch.equal(code_kv(kv_of([{"k": x}]), codec)[0]["k"], x)
    assert code_kv(kv_of([{"k": zeros, "v": zeros}]), codec).loss == Loss(0.0, 0.0, {"k": 0.0, "v": 0.0})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@CODECS
def test_values_without_codes_are_refused_by_name(codec, bad):
    x = values(2, 5, 4, torch.float32)
    x[1, 3, 2] = bad
    with pytest.raises(ValueError, match=r"layer 1 channel 'v' holds values that are not finite.*as it is"):
        code_kv(kv_of([{"k": values(2, 5, 4, torch.float32)}, {"v": x}]), codec)
