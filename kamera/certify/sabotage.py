"""Operators that are wrong on purpose: a probe that misses a fault in them cannot rule it out in a sound one.

Each arm takes a chunk's `Material`, and returns the KV that a build with one fault would serve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kamera.ops import KV, Layout, LowRank, Patch, apply_patch, floats


@dataclass(frozen=True, eq=False)
class Material:
    """All inputs from which an arm serves a chunk.

    ``canonical`` is ``offset`` (per axis) from its place in the window, and ``patch`` is its deficit there.
    ``another`` is the patch of another chunk of the window, ``stale`` the chunk's own behind antecedents that
    have left. ``seed`` is that of random patches.
    """

    canonical: KV
    patch: Patch
    layout: Layout
    offset: tuple[int, ...]
    another: Patch
    stale: Patch
    seed: int


def _served(of: Material, patch: Patch, times: int = 1) -> KV:
    return apply_patch(of.canonical, patch, of.layout, [times * step for step in of.offset])


SABOTAGES: dict[str, Callable[[Material], KV]] = {
    "no rotation": lambda of: _served(of, of.patch, times=0),
    "rotated twice": lambda of: _served(of, of.patch, times=2),
    "K not patched": lambda of: _served(of, _only(of, phased=False)),
    "V not patched": lambda of: _served(of, _only(of, phased=True)),
    "another chunk's patch": lambda of: _served(of, _fitted(of.another, of.patch)),
    "random patch": lambda of: _served(of, _random_like(of.patch, of.seed)),
    "stale patch": lambda of: _served(of, of.stale),
}
"""Arms by their fault. K means the phased channels (k_pe of MLA too), V the free ones."""

SHOWN_BY_KV = frozenset({"K not patched"})
"""Faults that answers need not show, since a model may bind in V alone: the KV itself shows them then."""

OF_PATCHES = frozenset(SABOTAGES) - {"no rotation", "rotated twice"}
"""Faults of a patch. They do not apply to survivors, which are served as they were computed."""


def _only(of: Material, *, phased: bool) -> Patch:
    """The patch of the phased channels, or of the free ones."""
    return Patch(
        tuple(
            {
                c.name: layer[c.name]
                for c in spec.channels
                if c.name in layer and (c.rope is not None) is phased
            }
            for layer, spec in zip(of.patch.layers, of.layout, strict=True)
        )
    )


def _fitted(patch: Patch, to: Patch) -> Patch:
    """``patch`` with as many tokens as ``to``: its rows repeat from the first when they run out."""
    layers = []
    for layer, model in zip(patch.layers, to.layers, strict=True):
        fitted = {}
        for name in layer.keys() & model.keys():
            left, tokens = floats(layer[name].left), model[name].left.shape[0]
            fitted[name] = LowRank(left[torch.arange(tokens) % left.shape[0]], layer[name].right)
        layers.append(fitted)
    return Patch(tuple(layers))


def _random_like(patch: Patch, seed: int) -> Patch:
    """A random patch of the same rank and norm, layer by layer and channel by channel."""
    drawn = torch.Generator().manual_seed(seed)
    return Patch(tuple({name: _noise(f, drawn) for name, f in layer.items()} for layer in patch.layers))


def _noise(factors: LowRank, drawn: torch.Generator) -> LowRank:
    true = factors.dense()
    left, right = (torch.randn(n, factors.rank, generator=drawn) for n in true.shape)
    scale = float(true.float().norm()) / float((left @ right.T).norm())
    return LowRank((left * scale).to(true.device), right.to(true.device))
