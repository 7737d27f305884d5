"""Composed patches: what a chunk absorbs from any order of any subset, out of singles and ordered pairs.

D(i) is the chunk's deficit behind i alone, D(i, j) behind i and then j, all in the canonical frame. In a
deeper model no sum of them is the deficit behind many: what a token says of one thing it takes from the
antecedent that spoke of it *last* and that antecedent, in its turn, from the last one before *it*. Both can
be read off the pairs, token by token and layer by layer:

* j takes over from i where D(i, j) is near D(j) and far from D(i);
* i bears on what j says where D(i, j) is far from D(j) although j has taken over.

`last_word` gives each pair of the order the weight of that reading, and sums the pairs under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from einops import einsum, rearrange

from kamera.ops.lowrank import Deltas, Patch

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

_TINY = 1e-30


class Blend(NamedTuple):
    """A layer's composition ``[tokens, features]``, and per token the variance of what it is blended of."""

    value: torch.Tensor
    variance: torch.Tensor


class Composed(NamedTuple):
    """A deficit composed for one order, and how much its terms contradict each other.

    ``doubt`` is the share of the terms' weighted energy that the composition does not keep: 0.0 where every
    token takes one term or equal ones, towards 1.0 where it averages terms that cancel out. ``missed`` is the
    share of a known deficit's energy that composition misses, None where none is known.
    """

    deltas: Deltas
    doubt: float
    missed: float | None = None


def terms_of(order: Sequence[Name]) -> list[tuple[Name, ...]]:
    """The singles and ordered pairs an order is composed of; of one or two antecedents, the order itself."""
    if len(order) <= 2:
        return [tuple(order)]
    singles: list[tuple[Name, ...]] = [(name,) for name in order]
    return singles + [(before, after) for before, after in itertools.combinations(order, 2)]


def compose(
    terms: Mapping[tuple[Name, ...], Patch],
    order: Sequence[Name],
    known: tuple[Sequence[Name], Patch] | None = None,
) -> Composed:
    """The deficit behind ``order`` from the patches of `terms_of` it.

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
    deltas: list[dict[str, torch.Tensor]] = []
    kept = said = missed = truth = 0.0
    for number in range(len(next(iter(terms.values())).layers)):
        patches = {term: terms[term] for term in wanted}
        if known is not None:
            patches = {**patches, (): known[1]}
        dense, widths = _dense(patches, number)
        if not widths:
            deltas.append({})
            continue
        blend = last_word(dense, order)
        energy = _energy(blend.value)
        kept, said = kept + float(energy.sum()), said + float((energy + blend.variance).sum())
        value = blend.value
        if known is not None:
            there = last_word(dense, known[0]).value
            missed += float(_energy(dense[()] - there).sum())
            truth += float(_energy(dense[()]).sum())
            value = make_up(value, there, dense[()])
        deltas.append(dict(zip(widths, value.split(list(widths.values()), dim=1), strict=True)))
    doubt = max(0.0, 1.0 - kept / said) if said else 0.0
    return Composed(tuple(deltas), doubt, None if known is None else missed / truth if truth else 0.0)


def last_word(terms: Mapping[tuple[Name, ...], torch.Tensor], order: Sequence[Name]) -> Blend:
    """One layer behind ``order``: pairs ``[tokens, features]`` under the weights of `readings`."""
    if len(order) <= 2:
        alone = terms[tuple(order)]
        return Blend(alone, alone.new_zeros(alone.shape[0]))
    value: torch.Tensor | None = None
    second = torch.zeros(())
    for (i, j), weight in readings(terms, order).items():
        pair = terms[order[i], order[j]]
        part = einsum(weight, pair, "tokens, tokens features -> tokens features")
        value = part if value is None else value + part
        second = second + weight * _energy(pair)
    assert value is not None, "three antecedents make pairs"
    return Blend(value, (second - _energy(value)).clamp_min(0.0))


def readings(
    terms: Mapping[tuple[Name, ...], torch.Tensor], order: Sequence[Name]
) -> dict[tuple[int, int], torch.Tensor]:
    """How much of each token ``[tokens]`` is what pair (i, j), places in ``order``, says; in all 1.

    The last word goes from place to place with `takes_over`. Of the pairs in which j has it, the latest i
    that bears on j is read; where none does, all pairs with j that leave it the last word, evenly.
    """
    places = range(len(order))
    pairs = list(itertools.combinations(places, 2))
    takes = {(i, j): takes_over(*_of(terms, order, i, j)) for i, j in pairs}
    bears = {(i, j): bears_on(*_of(terms, order, i, j)) for i, j in pairs}
    one = torch.ones_like(takes[0, 1])
    last = [one]
    for j in places[1:]:
        last.append(sum((last[i] * takes[i, j] for i in range(j)), torch.zeros_like(one)))
        last[:j] = [last[i] * (1 - takes[i, j]) for i in range(j)]
    weights = {pair: torch.zeros_like(one) for pair in pairs}
    for j in places:
        rest = last[j]
        for i in reversed(range(j)):
            weights[i, j] = weights[i, j] + rest * bears[i, j]
            rest = rest * (1 - bears[i, j])
        # the floor decides where no pair is left: it falls to all of them
        even = {(i, j): 1 - bears[i, j] + _TINY for i in range(j)}
        even |= {(j, k): 1 - takes[j, k] + _TINY for k in places[j + 1 :]}
        total = torch.stack(list(even.values())).sum(0)
        for pair, share in even.items():
            weights[pair] = weights[pair] + rest * share / total
    return weights


def takes_over(first: torch.Tensor, second: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Per token, how far the pair has gone from what the first says to what the second says (0 to 1)."""
    gone, left = _energy(pair - first), _energy(pair - second)
    return gone / (gone + left + _TINY)


def bears_on(first: torch.Tensor, second: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Per token, whether the pair is something else than what the second says alone (0 to 1)."""
    changed = _energy(pair - second) / ((_energy(pair) + _energy(second)) / 2 + _TINY)
    steep = (changed / BEARS_FROM) ** BEARS_BY
    return steep / (1 + steep)


def make_up(here: torch.Tensor, there: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """``here`` with what composition missed ``there``, token by token as far as both are the same.

    All are ``[tokens, features]``; ``known`` is the deficit that ``there`` was composed for.
    """
    moved = _energy(here - there) / ((_energy(here) + _energy(there)) / 2 + _TINY)
    alike = 1 / (1 + moved / SAME_FROM)
    return here + rearrange(alike, "tokens -> tokens 1") * (known - there)


def _of(
    terms: Mapping[tuple[Name, ...], torch.Tensor], order: Sequence[Name], i: int, j: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return terms[(order[i],)], terms[(order[j],)], terms[order[i], order[j]]


def _energy(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(-1)


def _dense(
    patches: Mapping[tuple[Name, ...], Patch], number: int
) -> tuple[dict[tuple[Name, ...], torch.Tensor], dict[str, int]]:
    """Every patch's layer with its channels side by side, and their widths; zeros where it says nothing."""
    layers = {term: patch.layers[number] for term, patch in patches.items()}
    said = {name: f for layer in layers.values() for name, f in layer.items()}
    widths = {name: said[name].right.shape[0] for name in sorted(said)}
    out = {}
    for term, layer in layers.items():
        parts = [
            layer[name].dense() if name in layer else torch.zeros(said[name].left.shape[0], width)
            for name, width in widths.items()
        ]
        out[term] = torch.cat(parts, dim=1) if parts else torch.empty(0, 0)
    return out, widths
