"""Operators that are wrong on purpose: what a probe cannot see in them, it cannot vouch for in a sound one.

Each arm takes what a chunk is served from, and gives the KV a build with one thing wrong would serve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kamera.ops import KV, Layout, LowRank, Patch, apply_patch, floats


@dataclass(frozen=True, eq=False)
class Material:
    """All an arm serves a chunk from.

    ``canonical`` stands ``offset`` (per axis) from where it is to be served, and lacks what ``patch`` adds.
    ``another`` is the patch of another chunk of the window, ``stale`` the chunk's own behind antecedents that
    have left. ``seed`` draws what is random.
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
"""By what is wrong. K stands for the channels that carry phase (k_pe of MLA too), V for the others."""

SHOWN_BY_KV = frozenset({"K not patched"})
"""What answers need not show: a model may bind in V alone. That keys are patched is read off the KV then."""

OF_PATCHES = frozenset(SABOTAGES) - {"no rotation", "rotated twice"}
"""Faults of a patch. They do not bear on survivors, which are served as they were computed."""


def _only(of: Material, *, phased: bool) -> Patch:
    """The patch of the channels that carry phase, or of those that do not."""
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
    """A patch with as many tokens as another has: its rows from the first again where they end."""
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
