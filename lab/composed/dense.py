"""`lab.composed.compose`, slow and obvious: every term a matrix, one layer after another.

Terms are ``[tokens, features]`` by antecedents, all channels of a layer side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from einops import rearrange

from kamera.ops import Patch
from lab.composed.compose import Composed, Name, alike, bearing, over, readings, triples_of


class Blend(NamedTuple):
    """A layer's composition ``[tokens, features]``, and per token the variance of what it is blended of."""

    value: torch.Tensor
    variance: torch.Tensor


def last_word(terms: Mapping[tuple[Name, ...], torch.Tensor], order: Sequence[Name]) -> Blend:
    """One layer behind ``order``: pairs ``[tokens, features]`` under the weights of `readings`.

    Where triples of the order are there, a pair is first made what they make of it.
    """
    if len(order) <= 2:
        alone = terms[tuple(order)]
        return Blend(alone, alone.new_zeros(alone.shape[0]))
    value: torch.Tensor | None = None
    second = torch.zeros(())
    for (i, j), weight in weights_of(terms, order).items():
        pair = terms[order[i], order[j]]
        third = [t for t in triples_of(order) if t in terms and order[i] in t and order[j] in t]
        shares = [bearing(_energy(terms[t] - pair), _energy(terms[t]), _energy(pair)) for t in third]
        most = sum(shares, torch.zeros_like(weight)).clamp_min(1.0)
        read = [(pair, weight * (1.0 - sum(shares, torch.zeros_like(weight)) / most))]
        read += [(terms[t], weight * share / most) for t, share in zip(third, shares, strict=True)]
        for term, part in read:
            more = rearrange(part, "tokens -> tokens 1") * term
            value = more if value is None else value + more
            second = second + part * _energy(term)
    assert value is not None, "three antecedents make pairs"
    return Blend(value, (second - _energy(value)).clamp_min(0.0))


def weights_of(
    terms: Mapping[tuple[Name, ...], torch.Tensor], order: Sequence[Name]
) -> dict[tuple[int, int], torch.Tensor]:
    """`readings` of terms: the weight of each pair of places, ``[tokens]``."""

    def of(i: int, j: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return terms[(order[i],)], terms[(order[j],)], terms[order[i], order[j]]

    return readings(len(order), lambda i, j: takes_over(*of(i, j)), lambda i, j: bears_on(*of(i, j)))


def takes_over(first: torch.Tensor, second: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Per token, how far the pair has gone from what the first says to what the second says (0 to 1)."""
    return over(_energy(pair - first), _energy(pair - second))


def bears_on(first: torch.Tensor, second: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Per token, whether the pair is something else than what the second says alone (0 to 1)."""
    return bearing(_energy(pair - second), _energy(pair), _energy(second))


def make_up(here: torch.Tensor, there: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """``here`` with what composition missed ``there``, token by token as far as both are the same.

    All are ``[tokens, features]``; ``known`` is the deficit that ``there`` was composed for.
    """
    same = alike(_energy(here - there), _energy(here), _energy(there))
    return here + rearrange(same, "tokens -> tokens 1") * (known - there)


def composed(
    terms: Mapping[tuple[Name, ...], Patch],
    order: Sequence[Name],
    known: tuple[Sequence[Name], Patch] | None = None,
) -> Composed:
    """As `lab.composed.compose`, of terms that are all there."""
    deltas: list[dict[str, torch.Tensor]] = []
    kept = said = missed = truth = 0.0
    for number in range(len(next(iter(terms.values())).layers)):
        held = dict(terms) | ({} if known is None else {(): known[1]})
        dense, widths = _dense(held, number)
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
