"""What is to be stored, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kamera.store.info import ObjectInfo
from kamera.store.keys import PATCH_KINDS
from kamera.store.records import Record


class PutOrder(NamedTuple):
    """A record to be stored under ``name``, by ``replace`` over the one that is there.

    ``needs``: the name of another in the batch that it depends on. ``file``: what it is encoded as already.
    """

    name: str
    record: Record
    replace: bool
    needs: str = ""
    file: tuple[ObjectInfo, bytes] | None = None


def put_rank(record: Record) -> int:
    """Place in a batch: canonicals need their encodings, patches their canonicals."""
    return 0 if record.kind == "encoding" else 2 if record.kind in PATCH_KINDS else 1


def put_batches(orders: Mapping[int, PutOrder]) -> Iterable[list[int]]:
    """The numbers of the orders by `put_rank`: one batch, or more if an object is ordered twice."""
    rest = sorted(orders, key=lambda i: put_rank(orders[i].record))
    while rest:
        first = {orders[i].name: i for i in reversed(rest)}
        yield [i for i in rest if first[orders[i].name] == i]
        rest = [i for i in rest if first[orders[i].name] != i]


def refuse_dependent(order: PutOrder, outcomes: dict[str, Any]) -> bool:
    """True if the object that an order needs was refused: then it is, too, for the same reason."""
    why = outcomes.get(order.needs)
    if isinstance(why, Exception):
        outcomes[order.name] = why
    return isinstance(why, Exception)
