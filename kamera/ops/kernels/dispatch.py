"""`serve`: check every argument, then write by the fastest implementation that runs here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch

from kamera.ops.kernels import native_path, torch_path
from kamera.ops.kernels.launches import Writing, stored_blocks
from kamera.ops.kv import KV
from kamera.ops.layout import Channel, Layout, check_layers
from kamera.ops.lowrank import LowRanks, Patch

Path = Literal["torch", "native", "triton"]
"""The implementation that wrote."""


def serve(
    into: KV,
    source: KV,
    patch: Patch | None,
    layout: Layout,
    offset: Sequence[int],
    *,
    phased_only: bool = False,
) -> Path:
    """Write R(δ)(source + patch) into ``into``, in place: the result of `apply_patch` in fewer passes.

    ``into`` and ``source`` are of the same groups; ``into`` is usually views of a preallocated live buffer
    (any strides, any dtype) and must not share memory with ``source``, which is floats or a `CodedKV` that is
    decoded on the way. ``offset`` holds one integer per position axis. ``phased_only`` writes only the phased
    channels, for a target that holds the free ones already (a slide); neither KV then needs the free ones.

    Sums are done in float32 (float64 where source or factors are) and cast last. A zero offset without
    a patch keeps the source's bits. Returns the implementation that ran. Raises ValueError, before anything
    is written, for shapes, channels or an offset that do not fit the layout.
    """
    if patch is not None:
        if len(patch.blocks) != len(layout):
            raise ValueError(f"patch of {len(patch.blocks)} layers, layout of {len(layout)}")
        patch = patch.regroup(into.groups)
    given = Writing(into, source, patch, layout, tuple(offset), phased_only)
    _check(given)
    path, fused = _candidate(into)
    if fused is not None and path not in _broken and fused.can_write(given):
        try:
            fused.write_kv(given)
            return path
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # triton lacks a compiler for its launcher, or support for the device
            _broken[path] = error
            warnings.warn(f"the {path} path cannot run here, torch serves instead: {error}", stacklevel=2)
    torch_path.write_kv(given)
    return "torch"


_broken: dict[Path, Exception] = {}
"""Implementations that failed in this process, with the error; they are not tried again."""


def _candidate(into: KV) -> tuple[Path, ModuleType | None]:
    """The fused implementation for the device of the targets, if there is one."""
    for block in into.parts:
        for tensor in block.values():
            if tensor.device.type == "cpu":
                return "native", native_path
            return "triton", _triton() if tensor.device.type == "cuda" else None
    return "torch", None


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from kamera.ops.kernels import triton_path

    return triton_path


def _check(given: Writing) -> None:
    into, source, patch, layout, offset, phased_only = given
    check_layers(into.groups, layout)
    if source.groups != into.groups:
        raise ValueError(
            f"source of layers {source.groups}, target of {into.groups}: they are not equal blocks"
        )
    stored = stored_blocks(source)
    tokens: int | None = None
    for group, layers in enumerate(into.groups):
        spec, target = layout[layers[0]], into.parts[group]
        factors = {} if patch is None else patch.blocks.parts[group]
        names = {c.name for c in spec.channels}
        for what, held in (("target", target), ("source", stored[group]), ("patch", factors)):
            if unknown := held.keys() - names:
                raise ValueError(
                    f"{what} layer {layers[0]} has channels {sorted(unknown)}, layout: {sorted(names)}"
                )
        for c in spec.channels:
            if c.rope is None and phased_only:
                continue
            for what, held in (("source", stored[group]), ("target", target)):
                if c.name not in held:
                    raise ValueError(f"{what} layer {layers[0]} lacks channel {c.name}")
                shape = tuple(held[c.name].shape)
                tokens = shape[2] if tokens is None and len(shape) == 4 else tokens
                if shape != (len(layers), c.heads, tokens, c.dim):
                    raise ValueError(
                        f"{what} layer {layers[0]} channel {c.name}: shape {shape[1:]}, "
                        f"expected ({c.heads}, {tokens}, {c.dim})"
                    )
            _check_channel(c, factors.get(c.name), tokens, offset, layers)


def _check_channel(
    channel: Channel,
    factors: LowRanks | None,
    tokens: int | None,
    offset: Sequence[int],
    layers: Sequence[int],
) -> None:
    layer = layers[0]
    if channel.rope is not None:
        if len(offset) != channel.rope.num_axes:
            raise ValueError(
                f"offset {tuple(offset)} has {len(offset)} axes, "
                f"the phase of layer {layer} channel {channel.name} has {channel.rope.num_axes}"
            )
        stop = channel.rotary_start + channel.rope.rotary_dim
        if channel.dim < stop:
            raise ValueError(
                f"layer {layer} channel {channel.name} has {channel.dim} features, "
                f"its phase needs {channel.rotary_start}..{stop}"
            )
    if factors is not None:
        shape = (factors.left.shape[0], factors.right.shape[0])
        if shape != (tokens, channel.features):
            layer = next(i for i, rank in zip(layers, factors.ranks, strict=True) if rank)
            raise ValueError(
                f"patch [{shape[0]} tokens, {shape[1]} features] does not fit layer {layer} "
                f"channel {channel.name} [{tokens} tokens, {channel.features} features]"
            )
