"""Composed patches: what a chunk absorbs from any order of any subset, out of singles, pairs and triples.

D(i) is the chunk's deficit behind i alone, D(i, j) behind i and then j, all in the canonical frame. In a
deep model no sum of them is the deficit behind many: what a token says of one thing it takes from the
antecedent that spoke of it *last*, and that antecedent, in its turn, from the last one before *it*. Both can
be read off the pairs, token by token and layer by layer:

* j takes over from i where D(i, j) is near D(j) and far from D(i);
* i bears on what j says where D(i, j) is far from D(j) although j has taken over.

Each pair of the order gets the weight of that reading, and the pairs are summed under it. A pair cannot show
what i takes from a third antecedent. Ordered triples can: where one that contains the pair is given, it takes
as much of the pair's weight as it differs from the pair. Distances of terms are computed from their factors;
only the sum is a matrix of a channel's size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from einops import rearrange

from kamera.ops.lowrank import LowRank, Patch, floats

Name = TypeVar("Name", str, int)

BEARS_FROM = 0.3
"""Share of a single's energy by which a pair must differ from it before its first is taken to bear on it.

At rank 16 an antecedent that is not read through another changes .02 to .25 of it, in deep layers below .15;
one that is changes .4 and more (gqa and mla backbones of the laboratory).
"""

BEARS_BY = 3.0
"""Steepness around `BEARS_FROM`."""

SAME_FROM = 0.3
"""Share of its energy by which a composition may change until a known deficit says nothing about it."""

TINY = 1e-30


class Composed(NamedTuple):
    """A deficit composed for one order, and how much its terms contradict each other.

    ``deltas`` is by layer, channel -> ``[tokens, features]``, of channels that a term names. ``doubt`` is the
    share of the terms' weighted energy that the composition does not keep: 0.0 where every token takes one
    term or equal ones, towards 1.0 where it averages terms that cancel out. ``missed`` is the share of a
    known deficit's energy that composition misses, None where none is known.
    """

    deltas: Sequence[Mapping[str, torch.Tensor]]
    doubt: float
    missed: float | None = None


def terms_of(order: Sequence[Name]) -> list[tuple[Name, ...]]:
    """The singles and ordered pairs an order is composed of; of one or two antecedents, the order itself."""
    if len(order) <= 2:
        return [tuple(order)]
    singles: list[tuple[Name, ...]] = [(name,) for name in order]
    return singles + [(before, after) for before, after in itertools.combinations(order, 2)]


def triples_of(order: Sequence[Name]) -> list[tuple[Name, ...]]:
    """The ordered triples that better a composition where they are given; none of fewer than four."""
    return list(itertools.combinations(order, 3)) if len(order) > 3 else []


def compose(
    terms: Mapping[tuple[Name, ...], Patch],
    order: Sequence[Name],
    known: tuple[Sequence[Name], Patch] | None = None,
) -> Composed:
    """The deficit behind ``order`` from the patches of `terms_of` it and those of `triples_of` it, float32.

    A missing triple is done without.

    ``known`` is the patch behind another order of any antecedents, whose terms are then needed too: what
    composition misses there is made up for wherever it composes the same here. Nothing given is modified.
    Raises ValueError for no antecedents, for one named twice and for a missing term.
    """
    if not order:
        raise ValueError("a leading chunk absorbs nothing: name at least one antecedent")
    orders = [order] if known is None else [order, known[0]]
    for names in orders:
        if len(set(names)) < len(names):
            raise ValueError(f"{list(names)} has an antecedent twice: pairs are of different ones")
    wanted = list(dict.fromkeys(term for names in orders for term in terms_of(names)))
    if missing := [term for term in wanted if term not in terms]:
        raise ValueError(f"no patch behind {missing[0]}: {len(missing)} of {len(wanted)} terms are missing")
    wanted += dict.fromkeys(term for names in orders for term in triples_of(names) if term in terms)
    groups = next(iter(terms.values())).groups
    layers = {term: terms[term].regroup(groups).layers for term in wanted}
    there_known = None if known is None else known[1].regroup(groups).layers
    deltas: list[dict[str, torch.Tensor]] = []
    kept = said = missed = truth = 0.0
    for number in range(sum(map(len, groups))):
        held = {term: found[number] for term, found in layers.items()}
        layer = _Layer(held | ({} if there_known is None else {(): there_known[number]}))
        if not layer.widths:
            deltas.append({})
            continue
        weights = _weights(layer, order)
        value = layer.blend(weights)
        kept += float(_energy(value).sum())
        said += float(sum(((w * layer.energy(term)).sum() for term, w in weights.items()), start=0.0))
        if known is not None:
            there, whole = layer.blend(_weights(layer, known[0])), layer.blend({(): layer.one})
            missed += float(_energy(_less(whole, there)).sum())
            truth += float(_energy(whole).sum())
            value = _made_up(value, there, whole)
        deltas.append(value)
    doubt = max(0.0, 1.0 - kept / said) if said else 0.0
    return Composed(deltas, doubt, None if known is None else missed / truth if truth else 0.0)


def readings(
    count: int,
    takes: Callable[[int, int], torch.Tensor],
    bears: Callable[[int, int], torch.Tensor],
) -> dict[tuple[int, int], torch.Tensor]:
    """How much of each token ``[tokens]`` is what pair (i, j) of ``count`` places says; in all 1.

    The last word goes from place to place with ``takes`` (the share j takes over from i). Of the pairs in
    which j has it, the latest i that ``bears`` on j is read; where none does, all pairs with j that leave it
    the last word, evenly.
    """
    places = range(count)
    taken = {pair: takes(*pair) for pair in itertools.combinations(places, 2)}
    borne = {pair: bears(*pair) for pair in taken}
    one = torch.ones_like(taken[0, 1])
    last = [one]
    for j in places[1:]:
        last.append(sum((last[i] * taken[i, j] for i in range(j)), torch.zeros_like(one)))
        last[:j] = [last[i] * (1 - taken[i, j]) for i in range(j)]
    weights = {pair: torch.zeros_like(one) for pair in taken}
    for j in places:
        rest = last[j]
        for i in reversed(range(j)):
            weights[i, j] = weights[i, j] + rest * borne[i, j]
            rest = rest * (1 - borne[i, j])
        # the floor decides where no pair is left: it falls to all of them
        even = {(i, j): 1 - borne[i, j] + TINY for i in range(j)}
        even |= {(j, k): 1 - taken[j, k] + TINY for k in places[j + 1 :]}
        total = torch.stack(list(even.values())).sum(0)
        for pair, share in even.items():
            weights[pair] = weights[pair] + rest * share / total
    return weights


def through(
    pairs: Mapping[tuple[Name, ...], torch.Tensor],
    triples: Iterable[tuple[Name, ...]],
    bears: Callable[[tuple[Name, ...], tuple[Name, ...]], torch.Tensor],
) -> dict[tuple[Name, ...], torch.Tensor]:
    """The weights of ``pairs`` ``[tokens]``, shared with the ``triples`` that contain them.

    ``bears`` says how much a triple differs from a pair (0 to 1). Each triple takes that share of the pair's
    weight; where the shares exceed 1, they are scaled to 1. The sum of all weights stays the same.
    """
    weights = dict(pairs)
    held = list(triples)
    for pair, whole in pairs.items():
        borne = {triple: bears(triple, pair) for triple in held if set(pair) <= set(triple)}
        if not borne:
            continue
        total = torch.stack(list(borne.values())).sum(0).clamp_min(1.0)
        for triple, share in borne.items():
            part = whole * share / total
            weights[triple] = weights.get(triple, torch.zeros_like(whole)) + part
            weights[pair] = weights[pair] - part
    return weights


def over(gone: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """How far a pair has gone from its first to its second (0 to 1), from its distances to both."""
    return gone / (gone + left + TINY)


def bearing(left: torch.Tensor, pair: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Whether a pair is something else than its second alone (0 to 1): their distance, and their energies."""
    steep = (left / ((pair + second) / 2 + TINY) / BEARS_FROM) ** BEARS_BY
    return steep / (1 + steep)


def alike(moved: torch.Tensor, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Whether a composition is the same in two orders (0 to 1): their distance, and their energies."""
    return 1 / (1 + moved / ((here + there) / 2 + TINY) / SAME_FROM)


class _Layer(Generic[Name]):
    """One layer of every term. A term that does not name a channel says nothing there."""

    def __init__(self, terms: Mapping[tuple[Name, ...], Mapping[str, LowRank]]) -> None:
        self._sides: dict[tuple[Name, ...], dict[str, tuple[torch.Tensor, torch.Tensor]]] = {
            term: {name: (floats(f.left).float(), floats(f.right).float()) for name, f in layer.items()}
            for term, layer in terms.items()
        }
        said = {name: sides for layer in self._sides.values() for name, sides in layer.items()}
        self.widths: dict[str, int] = {name: said[name][1].shape[0] for name in sorted(said)}
        left = next((left for left, _ in said.values()), torch.empty(0))
        self.one: torch.Tensor = left.new_ones(left.shape[0])
        self._energies: dict[tuple[Name, ...], torch.Tensor] = {}

    def held(self, terms: Iterable[tuple[Name, ...]]) -> list[tuple[Name, ...]]:
        """Those of these terms that are there."""
        return [term for term in terms if term in self._sides]

    def energy(self, term: tuple[Name, ...]) -> torch.Tensor:
        """Energy of each token ``[tokens]``."""
        if term not in self._energies:
            self._energies[term] = self._cross(term, term)
        return self._energies[term]

    def apart(self, one: tuple[Name, ...], other: tuple[Name, ...]) -> torch.Tensor:
        """Energy of the difference of two terms, per token."""
        return (self.energy(one) + self.energy(other) - 2 * self._cross(one, other)).clamp_min(0.0)

    def blend(self, weights: Mapping[tuple[Name, ...], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sum of terms weighted token by token: by channel, ``[tokens, features]``."""
        out = {}
        for name, width in self.widths.items():
            lefts, rights = [self.one.new_zeros(len(self.one), 0)], [self.one.new_zeros(width, 0)]
            for term, weight in weights.items():
                if name in self._sides[term]:
                    left, right = self._sides[term][name]
                    lefts.append(rearrange(weight.to(left.dtype), "tokens -> tokens 1") * left)
                    rights.append(right)
            out[name] = torch.cat(lefts, dim=1) @ torch.cat(rights, dim=1).T
        return out

    def _cross(self, one: tuple[Name, ...], other: tuple[Name, ...]) -> torch.Tensor:
        """Inner product of two terms per token. In float64: differences of near terms are small."""
        total = self.one.double() * 0
        for name in self._sides[one].keys() & self._sides[other].keys():
            (left, right), (left_too, right_too) = self._sides[one][name], self._sides[other][name]
            gram = right.double().T @ right_too.double()
            total = total + ((left.double() @ gram) * left_too.double()).sum(1)
        return total


def _weights(layer: _Layer[Name], order: Sequence[Name]) -> dict[tuple[Name, ...], torch.Tensor]:
    """The terms of an order that are read, and the weight of each for every token."""
    if len(order) <= 2:
        return {tuple(order): layer.one}

    def takes(i: int, j: int) -> torch.Tensor:
        pair = (order[i], order[j])
        return over(layer.apart(pair, (order[i],)), layer.apart(pair, (order[j],)))

    def bears(i: int, j: int) -> torch.Tensor:
        pair, second = (order[i], order[j]), (order[j],)
        return bearing(layer.apart(pair, second), layer.energy(pair), layer.energy(second))

    def third(triple: tuple[Name, ...], pair: tuple[Name, ...]) -> torch.Tensor:
        return bearing(layer.apart(triple, pair), layer.energy(triple), layer.energy(pair))

    read = readings(len(order), takes, bears)
    pairs: dict[tuple[Name, ...], torch.Tensor] = {(order[i], order[j]): w for (i, j), w in read.items()}
    return through(pairs, layer.held(triples_of(order)), third)


def _made_up(
    here: dict[str, torch.Tensor], there: dict[str, torch.Tensor], known: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``here`` with what composition missed ``there``, token by token as far as both are the same."""
    same = alike(_energy(_less(here, there)), _energy(here), _energy(there))
    lacking = _less(known, there)
    return {name: here[name] + rearrange(same, "tokens -> tokens 1") * lacking[name] for name in here}


def _less(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one[name] - other[name] for name in one}


def _energy(channels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Energy of each token over all channels."""
    return torch.stack([x.square().sum(1) for x in channels.values()]).sum(0)
