"""The fused operator, compiled for the CPU: every value is read once and written once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kamera.ops.kernels.launches import Line, Shape, factor_dtypes, launches, servable
from kamera.ops.kernels.native import Launch, compiled
from kamera.ops.kv import KV
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Patch, floats
from kamera.ops.rope import turn_table

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODES = {8: 3, 4: 4}
_VALUES_PER_THREAD = 1 << 15
"""Values below which starting a thread takes longer than the work."""


def can_write(into: KV, source: KV, patch: Patch | None, layout: Layout, *, phased_only: bool) -> bool:
    """True if the kernel is built and supports these dtypes and strides."""
    built = compiled()
    if built is None:
        return False
    known = frozenset(_KINDS) if built.kamera_half() else frozenset(_KINDS) - {torch.float16}
    return factor_dtypes(patch) <= known and servable(into, source, layout, known, phased_only=phased_only)


def write(
    into: KV,
    source: KV,
    patch: Patch | None,
    layout: Layout,
    offset: Sequence[int],
    *,
    phased_only: bool,
) -> None:
    """`kamera.ops.kernels.serve` for arguments that are checked and for which `can_write` is true."""
    work = launches(into, source, patch, layout, offset, phased_only=phased_only)
    with torch.inference_mode():  # the target may have been made in it
        for shape, lines in work.items():
            _launch(shape, lines, tuple(offset))


def _launch(shape: Shape, lines: list[Line], offset: tuple[int, ...]) -> None:
    served = lines
    if shape.rope is None and not shape.bits:  # neither rotated nor decoded: a copy, unless patched
        served = [line for line in lines if line.factors is not None]
        for line in lines:
            if line.factors is None:
                line.target.copy_(line.source)
    tokens = lines[0].target.shape[1]
    if not served or not tokens:
        return
    held = [_held(line) for line in served]  # alive until the kernel returns
    table = torch.tensor([_entries(*pair) for pair in zip(served, held, strict=True)], dtype=torch.int64)
    cos = sin = None
    if shape.rope is not None:
        cos, sin = turn_table(shape.rope, offset, torch.float32, torch.device("cpu"))
    largest = ctypes.c_float(torch.finfo(shape.source).max)
    launch = Launch(
        table=table.data_ptr(),
        lines=len(served),
        heads=shape.heads,
        tokens=tokens,
        dim=shape.dim,
        start=shape.start,
        pairs=0 if cos is None else cos.shape[0],
        interleaved=shape.rope is not None and shape.rope.pairing == "interleaved",
        cos=0 if cos is None else cos.data_ptr(),
        sin=0 if sin is None else sin.data_ptr(),
        source_kind=_CODES[shape.bits] if shape.bits else _KINDS[shape.source],
        target_kind=_KINDS[shape.target],
        s_head=shape.strides[0],
        s_token=shape.strides[1],
        y_head=shape.strides[2],
        y_token=shape.strides[3],
        g_head=shape.strides[4],
        g_token=shape.strides[5],
        token_group=shape.token_group,
        feature_group=shape.feature_group,
        largest=ctypes.addressof(largest),
    )
    threads = min(torch.get_num_threads(), 1 + table.shape[0] * lines[0].target.numel() // _VALUES_PER_THREAD)
    built = compiled()
    assert built is not None, "can_write was not asked"
    if built.kamera_serve(ctypes.byref(launch), threads):
        raise MemoryError(f"no memory for {threads} threads' scratch of {shape.dim} features")


def _held(line: Line) -> tuple[torch.Tensor | None, ...]:
    """Steps, lows, left and right factor in the kernel's dtypes; only the right factor may be narrow."""
    steps, lows = (None if t is None else t.float() for t in (line.steps, line.lows))
    if line.factors is None:
        return steps, lows, None, None
    left, right = (floats(f).to("cpu").contiguous() for f in (line.factors.left, line.factors.right))
    return steps, lows, left.float(), right


def _entries(line: Line, held: tuple[torch.Tensor | None, ...]) -> list[int]:
    """A line of the kernel's table."""
    steps, lows, left, right = held
    tensors = (line.source, steps, lows, line.target, left, right)
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    return [*addresses, 0, 0] if right is None else [*addresses, right.shape[1], _KINDS[right.dtype]]
