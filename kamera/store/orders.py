"""What is to be stored, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kamera.store.records import Record


class Order(NamedTuple):
    """A record to be stored under ``name``.

    ``replace``: over the one that is there. ``needs``: the name of another without which it must not be
    stored, as far as that is in the same batch.
    """

    name: str
    record: Record
    replace: bool
    needs: str = ""


def turns(orders: Mapping[int, Order]) -> Iterable[list[int]]:
    """The numbers of the orders, in batches of different names: one, unless an object is ordered twice.

    Encodings come first, since canonicals need them.
    """
    left = sorted(orders, key=lambda i: orders[i].record.kind != "encoding")
    while left:
        first = {orders[i].name: i for i in reversed(left)}
        yield [i for i in left if first[orders[i].name] == i]
        left = [i for i in left if first[orders[i].name] != i]


def possible(orders: Sequence[Order], found: dict[str, Record | Exception | None]) -> list[Order]:
    """Those whose need was not refused; the others are ``found`` refused for the same reason."""
    left = []
    for order in orders:
        why = found.get(order.needs)
        if isinstance(why, Exception):
            found[order.name] = why
        else:
            left.append(order)
    return left
