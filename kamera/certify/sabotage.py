"""Operators that are wrong on purpose: a probe that misses a fault in them cannot rule it out in a sound one.

A fault changes what the serving kernels are given for a chunk: another patch, another phase, another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kamera.ops import KV, Channel, LayerLayout, Layout, LowRank, Patch, floats, kv_map, turn_factors
from kamera.ops.kernels import serve

AXES = ("t", "h", "w")
"""Names of the axes of a position where it has three."""

SCALE = 0.8
THETA = 2.0
"""By what the base of the rotation is multiplied in "wrong theta"."""

_NOTHING = 1e-3
"""Energy of a layer's patch, as a share of the strongest layer's, that may correct rounding alone."""


@dataclass(frozen=True, eq=False)
class Material:
    """All inputs from which the kernels serve a chunk.

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

    def served(self) -> KV:
        """The KV that the serving kernels write of it."""
        into = kv_map(self.canonical, torch.empty_like)
        serve(into, self.canonical, self.patch, self.layout, self.offset)
        return into

    def under(self, patch: Patch) -> Material:
        """The same with another patch."""
        return replace(self, patch=patch)


Fault = Callable[[Material], Material]


def _without_axis(axis: int) -> Fault:
    def fault(of: Material) -> Material:
        return replace(of, offset=tuple(0 if at == axis else way for at, way in enumerate(of.offset)))

    return fault


def _other_theta(of: Material) -> Material:
    return replace(of, layout=tuple(_each(spec, _turned_by_theta) for spec in of.layout))


def _turn_back(of: Material) -> Material:
    """The patch is turned back first, so that the turn of the sum leaves it as it is stored."""
    back = [-step for step in of.offset]
    return of.under(
        Patch.of(
            tuple(
                {name: turn_factors(f, spec.channel(name), back) for name, f in layer.items()}
                for layer, spec in zip(of.patch.layers, of.layout, strict=True)
            )
        )
    )


def _exchange(of: Material) -> Material:
    """The patches of the last two layers that have the same channels."""
    layers = list(of.patch.layers)
    for i in range(len(layers) - 1, 0, -1):
        if layers[i] and layers[i - 1] and _shapes(of.layout[i]) == _shapes(of.layout[i - 1]):
            layers[i - 1], layers[i] = layers[i], layers[i - 1]
            break
    return of.under(Patch.of(tuple(layers)))


def _drop(of: Material) -> Material:
    """The layer whose patch is the least of those that correct more than rounding."""
    energies = {i: e for i, layer in enumerate(of.patch.layers) if (e := _energy(layer)) > 0}
    if not energies:
        return of
    counted = [i for i, e in energies.items() if e >= _NOTHING * max(energies.values())]
    least = min(counted, key=energies.__getitem__)
    return of.under(Patch.of(tuple({} if i == least else layer for i, layer in enumerate(of.patch.layers))))


def _scale(of: Material) -> Material:
    return of.under(_map(of.patch, lambda f: LowRank(floats(f.left) * SCALE, floats(f.right))))


SABOTAGES: dict[str, Fault] = {
    "no rotation": lambda of: replace(of, offset=(0,) * len(of.offset)),
    "rotated twice": lambda of: replace(of, offset=tuple(2 * step for step in of.offset)),
    **{f"axis {name} not rotated": _without_axis(axis) for axis, name in enumerate(AXES)},
    "wrong theta": _other_theta,
    "patch not turned": _turn_back,
    "K not patched": lambda of: of.under(_only(of, phased=False)),
    "V not patched": lambda of: of.under(_only(of, phased=True)),
    "layers exchanged": _exchange,
    "layer dropped": _drop,
    "patch scaled": _scale,
    "another chunk's patch": lambda of: of.under(fit(of.another, of.patch)),
    "random patch": lambda of: of.under(random_like(of.patch, of.seed)),
    "stale patch": lambda of: of.under(of.stale),
}
"""Faults by name. K means the phased channels (k_pe of MLA too), V the free ones."""

OF_PHASE = frozenset(
    {"no rotation", "rotated twice", "wrong theta", *(f"axis {a} not rotated" for a in AXES)}
)
"""Faults of the rotation, which survivors share: they are served as they were computed, moved."""


def sabotages(axes: int) -> dict[str, Fault]:
    """The faults that a build for positions of so many axes can have."""
    single = {f"axis {name} not rotated" for name in AXES} if axes != len(AXES) else set()
    return {name: fault for name, fault in SABOTAGES.items() if name not in single}


def _each(spec: LayerLayout, change: Callable[[Channel], Channel]) -> LayerLayout:
    return replace(spec, channels=tuple(map(change, spec.channels)))


def _turned_by_theta(c: Channel) -> Channel:
    if c.rope is None:
        return c
    pairs = max(1, len(c.rope.inv_freq))
    return replace(
        c,
        rope=replace(
            c.rope, inv_freq=tuple(f * THETA ** (-i / pairs) for i, f in enumerate(c.rope.inv_freq))
        ),
    )


def _shapes(spec: LayerLayout) -> list[tuple[str, int]]:
    return [(c.name, c.features) for c in spec.channels]


def _only(of: Material, *, phased: bool) -> Patch:
    """The patch of the phased channels, or of the free ones."""
    return Patch.of(
        tuple(
            {
                c.name: layer[c.name]
                for c in spec.channels
                if c.name in layer and (c.rope is not None) is phased
            }
            for layer, spec in zip(of.patch.layers, of.layout, strict=True)
        )
    )


def fit(patch: Patch, to: Patch) -> Patch:
    """``patch`` with as many tokens as ``to``: its rows repeat from the first when they run out."""
    layers = []
    for layer, model in zip(patch.layers, to.layers, strict=True):
        fitted = {}
        for name in layer.keys() & model.keys():
            left, tokens = floats(layer[name].left), model[name].left.shape[0]
            fitted[name] = LowRank(left[torch.arange(tokens) % left.shape[0]], layer[name].right)
        layers.append(fitted)
    return Patch.of(tuple(layers))


def random_like(patch: Patch, seed: int) -> Patch:
    """A random patch of the same rank and norm, layer by layer and channel by channel."""
    drawn = torch.Generator().manual_seed(seed)
    return _map(patch, lambda factors: _noise(factors, drawn))


def _noise(factors: LowRank, drawn: torch.Generator) -> LowRank:
    true = factors.dense()
    left, right = (torch.randn(n, factors.rank, generator=drawn) for n in true.shape)
    scale = float(true.float().norm()) / float((left @ right.T).norm())
    return LowRank((left * scale).to(true.device), right.to(true.device))


def _map(patch: Patch, change: Callable[[LowRank], LowRank]) -> Patch:
    return Patch.of(tuple({name: change(f) for name, f in layer.items()} for layer in patch.layers))


def _energy(layer: Mapping[str, LowRank]) -> float:
    return sum(float(f.dense().double().square().sum()) for f in layer.values())
