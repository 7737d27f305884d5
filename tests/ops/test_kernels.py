"""The fused operator on the CPU: both paths against float64, and what `serve` promises around them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.ops import KV, Blocks, LowRank, Patch, apply_patch, code_kv, kv_of, kv_slice, relocate_kv
from kamera.ops.kernels import dispatch, native_path, serve, torch_path
from kamera.ops.kernels.launches import Writing
from kamera.ops.kernels.native_path import native_library
from tests.ops.kernel_cases import Case, cases, check, factors, layouts, reference, span, target

needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler on this machine")
PATHS = [
    pytest.param(torch_path, id="torch"),
    pytest.param(native_path, id="native", marks=needs_compiler),
]
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOKENS = (0, 1, 2, 7, 16, 33, 130)
ZERO, MOVE = (0, 0, 0), (40, 3, -7)


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tiles_of(values: int):
    """Small tiles split heads and tokens of the small cases here."""
    before, torch_path.TILE = torch_path.TILE, values
    try:
        yield
    finally:
        torch_path.TILE = before


def write(path, case: Case, views) -> bool:
    """Serve ``case`` by one path; False where the path says that it cannot."""
    given = Writing(views, case.source, case.patch, case.layout, tuple(case.offset), case.phased_only)
    if path is native_path and not path.can_write(given):
        return False
    path.write_kv(given)
    return True


def gqa(dtype=torch.float32, tokens=9, rank: int | None = 4, offset=MOVE, pairing="half") -> Case:
    layout = layouts(pairing, 3)["gqa"]
    patch = None if rank is None else factors(layout, tokens, rank, dtype)
    return Case(layout, span(layout, tokens, dtype), patch, offset, False, dtype, tokens)


@pytest.mark.parametrize("path", PATHS)
@given(
    cases(WIDE, TOKENS),
    st.sampled_from(WIDE[:3]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([torch_path.TILE, 150]),
)
def test_every_path_rounds_once_and_writes_only_its_target(path, case, other, across, count, tile):
    for dtype in {case.dtype, other}:
        buffer, views = target(case, dtype, across)
        with threads(count), tiles_of(tile):
            written = write(path, case, views)
        if written:
            check(case, buffer, views)
        else:
            assert torch.float64 in (case.dtype, dtype), "the compiled kernel knows all but float64"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("tile", [torch_path.TILE, 700])
def test_float32_agrees_with_the_slow_reference_to_rounding(path, pairing, rank, tile):
    case = gqa(tokens=150, rank=rank, pairing=pairing)
    _, views = target(case, torch.float32)
    with tiles_of(tile):
        assert write(path, case, views)
    for got, want in zip(views, apply_patch(case.source, case.patch, case.layout, MOVE), strict=True):
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=4e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", WIDE[:3])
def test_without_a_move_and_a_patch_the_bits_are_the_sources(path, dtype):
    case = gqa(dtype, rank=None, offset=ZERO)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    odd = torch.tensor(
        [-0.0, float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 2], dtype=dtype
    )
    case.source[1]["k"][0, 0, :4] = odd
    _, views = target(case, dtype)
    assert write(path, case, views)
    for i, c in case.written():
        assert torch.equal(views[i][c.name].contiguous().view(bits), case.source[i][c.name].view(bits))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@settings(max_examples=15)
@given(st.sampled_from(WIDE[:3]), st.tuples(*[st.integers(-9999, 9999)] * 3), st.integers(0, 99))
def test_a_move_without_a_patch_equals_relocation_bit_for_bit(path, pairing, dtype, offset, seed):
    layout = layouts(pairing, 3)["gqa"]
    case = Case(layout, span(layout, 20, dtype, seed), None, offset, False, dtype, 20)
    _, views = target(case, dtype)
    assert write(path, case, views)
    want = relocate_kv(case.source, layout, offset)
    assert all(torch.equal(views[i][c.name], want[i][c.name]) for i, c in case.written())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("dtype", WIDE[:3])
def test_codes_that_do_not_move_are_what_decoding_gives(path, codec, dtype):
    case = gqa(dtype, tokens=67, rank=None, offset=ZERO)
    case = replace(case, source=code_kv(case.source, codec))
    _, views = target(case, dtype)
    assert write(path, case, views)
    for i, c in case.written():
        want = case.source[i][c.name]
        torch.testing.assert_close(views[i][c.name], want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_slide_writes_the_phased_channels_and_needs_no_other():
    case = gqa(rank=None)
    _, views = target(case, torch.float32)
    before = views[1]["v"].clone()
    keys = only(case.source, "k")
    serve(views, keys, None, case.layout, case.offset, phased_only=True)
    assert torch.equal(views[1]["v"], before)
    torch.testing.assert_close(views[1]["k"].double(), reference(case)[1]["k"], rtol=0, atol=1e-5)


@needs_compiler
def test_a_path_that_fails_is_named_once_and_torch_serves(monkeypatch):
    monkeypatch.setattr(dispatch, "_broken", {})

    def fail(*args, **kwargs):
        raise OSError("no such chip")

    monkeypatch.setattr(native_path, "write_kv", fail)
    case = gqa()
    buffer, views = target(case, torch.float32)
    with pytest.warns(UserWarning, match="native path cannot run here.*no such chip"):
        assert serve(views, case.source, case.patch, case.layout, case.offset) == "torch"
    check(case, buffer, views)
    assert serve(views, case.source, case.patch, case.layout, case.offset) == "torch"


def low(tokens: int, features: int) -> LowRank:
    return LowRank(torch.ones(tokens, 2), torch.ones(features, 2))


CUT = gqa()


def only(kv: KV, *names: str) -> KV:
    return Blocks([{n: t for n, t in block.items() if n in names} for block in kv.parts], kv.groups)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": kv_of(CUT.source[:2])}, r"source of layers \(\(0,\), \(1,\)\), target of"),
        ({"patch": Patch.of(({},))}, "patch of 1 layers, layout of 3"),
        ({"source": kv_slice(CUT.source, 0, 8)}, r"layer 1 channel k: shape .* expected \(2, 8, 64\)"),
        ({"source": only(CUT.source, "k")}, "source layer 1 lacks channel v"),
        (
            {"source": kv_of(({"x": CUT.source[1]["k"]}, *CUT.source[1:]), CUT.source.groups)},
            r"source layer 0 has channels \['x'\]",
        ),
        ({"patch": Patch.of(({}, {}, {"x": low(9, 3)}))}, r"patch layer 1 has channels \['x'\]"),
        ({"patch": Patch.of(({}, {}, {"v": low(8, 140)}))}, r"patch \[8 tokens, 140 features\] does not fit"),
        ({"patch": Patch.of(({}, {}, {"v": low(9, 139)}))}, r"layer 2 channel v \[9 tokens, 140 features\]"),
        ({"offset": (1,)}, r"offset \(1,\) has 1 axes"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, message):
    case = replace(CUT, **change)
    buffer, views = target(CUT, torch.float32)
    with pytest.raises(ValueError, match=message):
        serve(views, case.source, case.patch, case.layout, case.offset)
    assert all(bool((t == 7).all()) for layer in buffer for t in layer.values())
