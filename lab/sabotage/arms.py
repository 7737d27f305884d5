"""Each arm: from the canonical, the patch and the offset to the KV served, with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kamera.ops import KV, Layout, LowRank, Patch, apply_patch, floats, relocate_kv

AXES = ("t", "h", "w")
"""Names of the axes of a position where it has three."""


@dataclass(frozen=True, eq=False)
class Material:
    """All an arm serves a chunk from.

    `canonical` is KV at the place it was computed at, `offset` the way from there to the place served, one
    entry per axis, `patch` what is to be added in the canonical frame. `another` is the patch of a chunk
    of the same shape in a window of the same kind, `stale` the patch formed behind antecedents that have
    been replaced. `seed` draws what is random.
    """

    canonical: KV
    patch: Patch
    layout: Layout
    offset: Sequence[int]
    another: Patch
    stale: Patch
    seed: int


Arm = Callable[[Material], KV]

SOUND, BLIND = "sound", "blind"


def sound(of: Material) -> KV:
    """R(δ)·(canonical + patch): nothing is wrong."""
    return apply_patch(of.canonical, of.patch, of.layout, of.offset)


def blind(of: Material) -> KV:
    """The canonical moved, no patch: the floor that η is taken from, and no sabotage."""
    return relocate_kv(of.canonical, of.layout, of.offset)


def not_rotated(of: Material) -> KV:
    """The phase stays that of the place the canonical was computed at."""
    return apply_patch(of.canonical, of.patch, of.layout, [0] * len(of.offset))


def rotated_twice(of: Material) -> KV:
    """The phase of twice the way."""
    return apply_patch(of.canonical, of.patch, of.layout, [2 * way for way in of.offset])


def axis_not_rotated(axis: int) -> Arm:
    """One axis of the position stays where it was."""

    def serve(of: Material) -> KV:
        offset = [0 if at == axis else way for at, way in enumerate(of.offset)]
        return apply_patch(of.canonical, of.patch, of.layout, offset)

    return serve


def keys_blind(of: Material) -> KV:
    """Phased channels (K, k_pe) get no patch."""
    return apply_patch(of.canonical, _without(of, phased=True), of.layout, of.offset)


def values_blind(of: Material) -> KV:
    """Free channels (V, c_kv) get no patch."""
    return apply_patch(of.canonical, _without(of, phased=False), of.layout, of.offset)


def anothers_patch(of: Material) -> KV:
    """The patch of another chunk of this shape."""
    return apply_patch(of.canonical, of.another, of.layout, of.offset)


def random_patch(of: Material) -> KV:
    """A random patch of the true one's rank and norm, layer by layer and channel by channel."""
    generator = torch.Generator().manual_seed(of.seed)
    layers = [
        {name: _random_like(factors, generator) for name, factors in layer.items()}
        for layer in of.patch.layers
    ]
    return apply_patch(of.canonical, Patch.of(layers, of.patch.groups), of.layout, of.offset)


def stale_patch(of: Material) -> KV:
    """The patch formed before the antecedents were replaced."""
    return apply_patch(of.canonical, of.stale, of.layout, of.offset)


def wrong_frame(of: Material) -> KV:
    """R(δ)·canonical + patch: the patch is not turned with the chunk."""
    moved = relocate_kv(of.canonical, of.layout, of.offset)
    return apply_patch(moved, of.patch, of.layout, [0] * len(of.offset))


def sabotage(axes: int) -> dict[str, Arm]:
    """The arms that must fail somewhere, by name; one more for each axis where there are several."""
    by_axis = {
        f"axis {AXES[axis]} not rotated": axis_not_rotated(axis)
        for axis in range(len(AXES))
        if axes == len(AXES)
    }
    return {
        "not rotated": not_rotated,
        "rotated twice": rotated_twice,
        **by_axis,
        "keys left blind": keys_blind,
        "values left blind": values_blind,
        "another's patch": anothers_patch,
        "random patch": random_patch,
        "stale patch": stale_patch,
        "patch in the wrong frame": wrong_frame,
    }


def _without(of: Material, *, phased: bool) -> Patch:
    """The patch without its phased channels, or without its free ones."""
    layers = [
        {c.name: layer[c.name] for c in spec.channels if c.name in layer and (c.rope is None) is phased}
        for layer, spec in zip(of.patch.layers, of.layout, strict=True)
    ]
    return Patch.of(layers, of.patch.groups)


def _random_like(factors: LowRank, generator: torch.Generator) -> LowRank:
    true = factors.dense()
    rank = factors.left.shape[1]
    left = torch.randn(true.shape[0], rank, generator=generator)
    right = torch.randn(true.shape[1], rank, generator=generator)
    scale = true.norm() / (left @ right.T).norm()
    dtype = floats(factors.left).dtype
    return LowRank((left * scale).to(dtype), right.to(dtype))
