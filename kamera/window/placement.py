"""Chunks as a set: in which order a window runs the least for them (paper, appendix E).

An order is priced by its plan, so nothing here knows how chunks are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Literal

from kamera.errors import WindowFull, quote

Placing = Literal["free", "given"]
"""The order of assembled chunks: the one in which the least is run, or the one that is given."""

EXHAUSTIVE = 4
"""Number of chunks of which all orders are priced; of more the `BEAM` best beginnings of each length."""

BEAM = 4

Price = tuple[float, float]
"""Tokens that run, and forwards."""

Order = tuple[int, ...]


def fitting(lengths: Sequence[int], room: int | None) -> list[int]:
    """Indices of the chunks that stand: each, as given, that fits beside those before it in ``room`` tokens.

    Raises WindowFull if none does.
    """
    chosen, free = list[int](), room
    for index, length in enumerate(lengths):
        if free is None or length <= free:
            chosen.append(index)
            free = None if free is None else free - length
    if not chosen:
        raise WindowFull(
            f"none of {len(lengths)} chunks fits: the first has {lengths[0]} tokens, the window has room for "
            f"{room}: raise max_tokens, or cut them smaller"
        )
    return chosen


def cheapest_order(items: Sequence[Any], price: Callable[[Sequence[Any]], Price]) -> list[Any]:
    """``items`` in the order of the least price, of equal ones in that nearest to the order given.

    Up to `EXHAUSTIVE` items all orders are priced, of more the best `BEAM` beginnings of each length; the
    order that is given is among them, so it is never dearer than that.
    """
    given = tuple(range(len(items)))

    def rank(order: Order) -> tuple[Price, Order]:
        return price([items[i] for i in order]), order

    if len(items) <= EXHAUSTIVE:
        orders: list[Order] = [*permutations(given)]
    else:
        orders = [()]
        for _ in items:
            longer = [(*order, i) for order in orders for i in given if i not in order]
            orders = sorted(longer, key=rank)[:BEAM]
        orders.append(given)
    return [items[i] for i in min(orders, key=rank)]


def check_placing(chunks: Any, max_tokens: Any, order: Any) -> None:
    """Raise ValueError for arguments of `KameraWindow.assemble` that mean nothing."""
    if isinstance(chunks, str) or not isinstance(chunks, Sequence) or not chunks:
        raise ValueError("assemble takes a list of at least one chunk: contents, chunks, slots or ids")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens={quote(max_tokens)}: give a whole number from 1 on, or None")
    if order not in ("free", "given"):
        raise ValueError(f'order {quote(order)} is neither "free" nor "given"')
