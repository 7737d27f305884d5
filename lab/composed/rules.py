"""Rules of composition that were tried beside the one that was taken (`lab.composed.compose`); a layer each.

Terms are ``[tokens, features]`` by antecedents, an order names at least one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from einops import rearrange

from lab.composed.dense import last_word, takes_over

Order = tuple[int, ...]
Terms = Mapping[Order, torch.Tensor]
Rule = Callable[[Terms, Order], torch.Tensor]


def linear(terms: Terms, order: Order) -> torch.Tensor:
    """(1 − λ(n−1))·ΣD(i) + λ·ΣD(i, j) with λ = 2/n: right where every pair bears on the chunk alike."""
    n = len(order)
    singles = torch.stack([terms[i,] for i in order]).sum(0)
    if n == 1:
        return singles
    pairs = torch.stack([terms[pair] for pair in itertools.combinations(order, 2)]).sum(0)
    return (2 / n - 1) * singles + 2 / n * pairs


def fold(terms: Terms, order: Order) -> torch.Tensor:
    """From left to right, per token: who has the last word, the winner so far or the next one.

    What is read at the end are the pairs of the winner so far and the last.
    """
    value = terms[order[0],]
    winner = {order[0]: torch.ones_like(value[:, 0])}
    for after in order[1:]:
        value = torch.zeros_like(value)
        taken = torch.zeros_like(value[:, 0])
        for before, share in list(winner.items()):
            pair = terms[before, after]
            value = value + rearrange(share, "tokens -> tokens 1") * pair
            takes = takes_over(terms[before,], terms[after,], pair)
            taken = taken + share * takes
            winner[before] = share * (1 - takes)
        winner[after] = taken
    return value


def last(terms: Terms, order: Order) -> torch.Tensor:
    """The rule that was taken."""
    return last_word(terms, order).value


def differing(rule: Rule, terms: Terms, order: Order, old: Order, known: torch.Tensor) -> torch.Tensor:
    """What was known of the old order, and how much the composition changes."""
    return known + rule(terms, order) - rule(terms, old)
