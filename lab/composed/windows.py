"""Windows nobody formed a patch for, and every arm's deficit in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from kamera.ops import Deltas, Patch, kv_of, mean_deficit, patch_of
from kamera.patches.orbit import orderings
from kamera.testbed import Episode, World
from lab.composed.compose import compose, terms_of, triples_of
from lab.composed.rules import Order, Rule, Terms, differing, fold, linear
from lab.paper.draw import MANY, NEW, Stage
from lab.paper.trial import Trial

WORLDS = ("override", "legends", "redundant")
"""Legends and renames that override each other; legends alone that do; legends that agree."""

ByLayer = Sequence[Mapping[str, torch.Tensor]]
"""Deficits by layer, channel -> ``[tokens, features]``: of what is not named nothing is said."""

TASKS = ("any order", "oldest left", "middle left", "new company")
DEPARTURES = TASKS[1:3]

IN_ORBIT = 12
"""Orders the mean of an orbit patch is taken over, at most."""


def served(task: str, count: int) -> str:
    """The arm that served windows without triples: with the old patch where three or more are left."""
    return "composed, known" if task in DEPARTURES and count > 3 else "composed"


@dataclass(eq=False)
class Pool(Stage):
    """An episode of one world."""

    world: str = "override"

    @cached_property
    def episode(self) -> Episode:
        """The frames, as in `Stage`."""
        if self.world == "override":
            return Stage.episode.func(self)  # type: ignore[attr-defined, no-any-return]
        drawn = World(self.seed).episode(self.index, layout="LLLLLLLLLPPPII")
        if self.world == "legends":
            return drawn
        said = {fact.glyph: fact.colour for frame in drawn.frames[:9] for fact in frame.facts}
        frames = [
            replace(frame, facts=tuple(replace(f, colour=said[f.glyph]) for f in frame.facts))
            if frame.kind == "legend"
            else frame
            for frame in drawn.frames
        ]
        return replace(drawn, frames=tuple(frames))


@dataclass(frozen=True)
class Window:
    """What stands before the items frame now, and what stood there when its patch was formed."""

    task: str
    order: Order
    old: Order


def windows(stage: Stage, count: int) -> list[Window]:
    """One window of each task, drawn from an episode; ``count`` antecedents stood there before."""
    old = tuple(range(count))
    rng = stage.rng(count)
    shuffled = old
    while shuffled == old:
        shuffled = tuple(int(i) for i in rng.permutation(count))
    middle = int(rng.integers(1, count - 1))
    stay = rng.permutation(count)[: (count + 1) // 2]
    company = rng.permutation([*stay, *NEW[: count - len(stay)]])
    orders = (shuffled, old[1:], old[:middle] + old[middle + 1 :], tuple(int(i) for i in company))
    return [Window(task, order, old) for task, order in zip(TASKS, orders, strict=True)]


@dataclass(eq=False)
class TermsOf:
    """Patches of one episode's items frame behind single antecedents, pairs and whole orders, as stored."""

    stage: Stage
    rank: int
    held: dict[Order, Patch] = field(default_factory=dict)

    def patch(self, order: Order) -> Patch:
        """The patch formed behind these antecedents."""
        if order not in self.held:
            scene = self.stage.scene(order)
            self.held[order] = patch_of(scene.delta, self.rank, scene.dtype).patch
            for large in ("delta", "conditioned"):
                scene.__dict__.pop(large, None)
        return self.held[order]

    def of(self, *orders: Order) -> dict[Order, Patch]:
        """Every term of these orders."""
        return {term: self.patch(term) for order in orders for term in terms_of(order)}

    def singles_and_pairs(self, *orders: Order) -> dict[Order, Patch]:
        """The same, singles of two antecedents too: rules read them."""
        singles = {(i,): self.patch((i,)) for order in orders for i in order}
        return singles | self.of(*orders)

    def triples(self, *orders: Order) -> dict[Order, Patch]:
        """The triples of these orders."""
        return {triple: self.patch(triple) for order in orders for triple in triples_of(order)}


def layered(
    like: Deltas, patches: Mapping[Order, Patch]
) -> Iterator[tuple[list[int], dict[Order, torch.Tensor]]]:
    """Per layer the widths of its channels, and every patch's deficit with channels side by side."""
    for number, layer in enumerate(like):
        dense = {}
        for order, patch in patches.items():
            held = patch.layers[number]
            parts = [held[n].dense() if n in held else torch.zeros_like(delta) for n, delta in layer.items()]
            dense[order] = torch.cat(parts, dim=1)
        yield [delta.shape[1] for delta in layer.values()], dense


def ruled(like: Deltas, patches: Mapping[Order, Patch], rule: Rule, order: Order) -> ByLayer:
    """What a rule makes of the terms, layer by layer."""
    out = []
    for (widths, dense), layer in zip(layered(like, patches), like, strict=True):
        out.append(dict(zip(layer, rule(dense, order).split(widths, dim=1), strict=True)))
    return out


@dataclass(frozen=True)
class Asked:
    """A window's questions under one arm: multi-hop ones only."""

    kl: float
    right: float
    agree: float


@dataclass(frozen=True)
class Row:
    """One window: every arm, and what composition says of itself."""

    task: str
    episode: int
    items: int
    arms: Mapping[str, Asked]
    doubt: float
    missed: float


def measure(terms: TermsOf, window: Window, others: TermsOf | None) -> Row:
    """All arms in one window; ``others`` are the terms of another episode's items frame."""
    stage, order, old = terms.stage, window.order, window.old
    trial = stage.trial(order, MANY)
    scene = trial.scene
    like = scene.delta
    patches = terms.singles_and_pairs(order, old)
    known = terms.patch(old)
    made = compose(patches, order)
    made_up = compose(patches, order, (old, known))
    every = orderings(len(order), IN_ORBIT, 0)
    means = [tuple(order[i] for i in o) for o in every if len(order) == 1 or o != tuple(range(len(order)))]
    mean = mean_deficit(stage.scene(o).delta for o in means)
    with_old = {**patches, (): known}

    def difference(dense: Terms, now: Order) -> torch.Tensor:
        return differing(fold, dense, now, old, dense[()])

    swapped = {term: patches.get(term[::-1]) or terms.patch(term[::-1]) for term in patches}
    deltas: dict[str, ByLayer] = {
        "own patch": like,
        "orbit": mean,
        "linear": ruled(like, patches, linear, order),
        "fold": ruled(like, patches, fold, order),
        "difference": ruled(like, with_old, difference, order),
        "composed": made.deltas,
        "composed, known": made_up.deltas,
        "SABOTAGE swapped": compose(swapped, order).deltas,
        "SABOTAGE random": _random(made.deltas, stage.index),
    }
    if more := terms.triples(order, old):
        deltas["triples"] = compose(patches | more, order).deltas
        deltas["triples, known"] = compose(patches | more, order, (old, known)).deltas
        deltas["SABOTAGE other triples"] = compose(patches | _shifted(more), order).deltas
    if others is not None:
        deltas["SABOTAGE another's"] = compose(others.singles_and_pairs(order), order).deltas
    dtype = scene.dtype
    factored = {name: patch_of(_full(d, like), terms.rank, dtype).patch for name, d in deltas.items()}
    arms = {name: _asked(trial, scene.patched(patch)) for name, patch in factored.items()}
    arms["old patch"] = _asked(trial, scene.patched(known))
    arms["blind"] = _asked(trial, scene.blind)
    items = int((trial.blind.hops > 1).sum())
    return Row(window.task, stage.index, items, arms, made_up.doubt, made_up.missed or 0.0)


def _shifted(terms: Mapping[Order, Patch]) -> dict[Order, Patch]:
    """Every term under the next one's antecedents."""
    names = list(terms)
    return {name: terms[other] for name, other in zip(names, names[1:] + names[:1], strict=True)}


def _full(deltas: ByLayer, like: Deltas) -> Deltas:
    """The blocks of ``like``, of zeros where nothing is said."""
    layers = [
        {n: layer.get(n, torch.zeros_like(d)) for n, d in there.items()}
        for layer, there in zip(deltas, like, strict=True)
    ]
    return kv_of(layers, like.groups)


def _asked(trial: Trial, kv: object) -> Asked:
    judged = trial.judge_kv(kv)  # type: ignore[arg-type]
    asked = judged.hops > 1
    return Asked(*(float(getattr(judged, name)[asked].sum()) for name in ("kl", "right", "agree")))


def _random(deltas: ByLayer, seed: int) -> ByLayer:
    """Noise of the same norm in every token, layer and channel."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for layer in deltas:
        noise = {n: torch.randn(d.shape, generator=generator) for n, d in layer.items()}
        out.append({n: x * (layer[n].norm(dim=1) / x.norm(dim=1)).unsqueeze(1) for n, x in noise.items()})
    return out


def library(count: int) -> tuple[int, int]:
    """Terms a set of ``count`` antecedents has, and the forwards that form them."""
    pairs = len(list(itertools.permutations(range(count), 2)))
    return count + pairs, count + 2 * pairs
