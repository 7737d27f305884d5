"""Operators that are wrong on purpose: a probe that misses a fault in them cannot rule it out in a sound one.

A fault changes what the serving kernels are given for a chunk: another patch, another phase, another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from kamera.ops import KV, Channel, LayerLayout, Layout, LowRank, Patch, floats, kv_map, rotate_factors
from kamera.ops.kernels import serve

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

    def served_kv(self) -> KV:
        """The KV that the serving kernels write of it."""
        into = kv_map(self.canonical, torch.empty_like)
        serve(into, self.canonical, self.patch, self.layout, self.offset)
        return into

    def under(self, fault: Fault) -> Material:
        """What a build with this fault gives to the kernels."""
        offset = tuple(step * way for step, way in zip(fault.steps, self.offset, strict=False))
        layout = tuple(_turn_by(fault.theta, spec) for spec in self.layout)
        patch = _wrong_patch(self, fault.patch) if fault.patch else self.patch
        return replace(self, offset=offset, layout=layout, patch=patch)


WrongPatch = Literal[
    "patch not turned",
    "K not patched",
    "V not patched",
    "layers exchanged",
    "layer dropped",
    "patch scaled",
    "another chunk's patch",
    "random patch",
    "stale patch",
]
"""What is done to a patch, or taken in its place."""


@dataclass(frozen=True)
class Fault:
    """What a build does wrong: factors of the ways along the axes and of the rotation's base, or the patch.

    ``patch`` names what is done to a patch, or taken in its place. What concerns the rotation alone (None)
    survivors share: they are served as computed, moved.
    """

    steps: tuple[int, int, int] = (1, 1, 1)
    theta: float = 1.0
    patch: WrongPatch | None = None


SABOTAGES = {
    "no rotation": Fault(steps=(0, 0, 0)),
    "rotated twice": Fault(steps=(2, 2, 2)),
    "axis t not rotated": Fault(steps=(0, 1, 1)),
    "axis h not rotated": Fault(steps=(1, 0, 1)),
    "axis w not rotated": Fault(steps=(1, 1, 0)),
    "wrong theta": Fault(theta=THETA),
}
SABOTAGES |= {name: Fault(patch=name) for name in get_args(WrongPatch)}
"""Faults by name. K means the phased channels (k_pe of MLA too), V the free ones."""


def sabotages(axes: int) -> dict[str, Fault]:
    """The faults that a build for positions of so many axes can have."""
    return {name: fault for name, fault in SABOTAGES.items() if axes == 3 or len(set(fault.steps)) == 1}


def _turn_by(theta: float, spec: LayerLayout) -> LayerLayout:
    channels = []
    for c in spec.channels:
        if c.rope is not None:
            pairs = max(1, len(c.rope.inv_freq))
            turned = tuple(f * theta ** (-i / pairs) for i, f in enumerate(c.rope.inv_freq))
            c = replace(c, rope=replace(c.rope, inv_freq=turned))
        channels.append(c)
    return replace(spec, channels=tuple(channels))


def _wrong_patch(of: Material, kind: WrongPatch) -> Patch:
    if kind == "another chunk's patch":
        return fit_rows(of.another, of.patch)
    if kind == "random patch":
        return random_like(of.patch, of.seed)
    if kind == "stale patch":
        return of.stale
    layers: list[Mapping[str, LowRank]] = list(of.patch.layers)
    if kind == "layers exchanged":
        _exchange(layers, of.layout)
    elif kind == "layer dropped":
        _drop(layers)
    else:
        changed = (
            {name: _wrong_factors(of, spec.channel(name), low, kind) for name, low in layer.items()}
            for layer, spec in zip(layers, of.layout, strict=True)
        )
        layers = [{name: low for name, low in layer.items() if low is not None} for layer in changed]
    return Patch.of(tuple(layers))


def _wrong_factors(of: Material, channel: Channel, low: LowRank, kind: WrongPatch) -> LowRank | None:
    """The factors of one channel of a layer; None for none."""
    if kind == "patch not turned":  # so that the turn of the sum leaves the patch as it is stored
        return rotate_factors(low, channel, [-way for way in of.offset])
    if kind == "patch scaled":
        return LowRank(floats(low.left) * SCALE, floats(low.right))
    return low if (channel.rope is None) == (kind == "K not patched") else None


def _exchange(layers: list[Mapping[str, LowRank]], layout: Layout) -> None:
    """The last two layers that have the same channels change places."""
    shapes = [[(c.name, c.features) for c in spec.channels] for spec in layout]
    for i in range(len(layers) - 1, 0, -1):
        if layers[i] and layers[i - 1] and shapes[i] == shapes[i - 1]:
            layers[i - 1], layers[i] = layers[i], layers[i - 1]
            return


def _drop(layers: list[Mapping[str, LowRank]]) -> None:
    """Leave out the layer whose patch is the least of those that correct more than rounding."""
    energies = {i: e for i, layer in enumerate(layers) if (e := _energy(layer)) > 0}
    counted = [i for i, e in energies.items() if e >= _NOTHING * max(energies.values())]
    if counted:
        layers[min(counted, key=energies.__getitem__)] = {}


def fit_rows(patch: Patch, to: Patch) -> Patch:
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
    layers = ({name: _noise(low, drawn) for name, low in layer.items()} for layer in patch.layers)
    return Patch.of(tuple(layers))


def _noise(factors: LowRank, drawn: torch.Generator) -> LowRank:
    true = factors.dense()
    left, right = (torch.randn(n, factors.rank, generator=drawn, dtype=torch.float32) for n in true.shape)
    scale = float(true.float().norm()) / float((left @ right.T).norm())
    return LowRank((left * scale).to(true.device), right.to(true.device))


def _energy(layer: Mapping[str, LowRank]) -> float:
    return sum(float(f.dense().double().square().sum()) for f in layer.values())
