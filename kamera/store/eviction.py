"""Eviction from a store: which objects leave first, by the recompute they save or by their last use.

The value of an object is the recompute that a use saves, times its use:

    saved = tokens × 1     a canonical or an anchor: its forward; a patch: the conditioned forward
            tokens × 0.5   an encoding: the vision tower
    used  = 2^(−age / half-life) + Σ over its uses of 2^(−(time since) / half-life)
    value = saved × used

A patch serves only together with its canonical, so a canonical can leave only with all its patches; by value
it is weighed with them: Σ value / Σ bytes. An encoding can leave once no canonical refers to it: without it,
a canonical is useless to a client that lacks the chunk's content. The least leaves first, until the rest
fits. By value, a patch without its canonical is worth nothing and always leaves. Pinned objects stay, and so
do the canonical of a pinned patch and the encoding of a canonical that stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kamera.store.disk.notes import decay
from kamera.store.info import Weighed
from kamera.store.keys import KINDS, PATCH_KINDS

ENCODING_COST = 0.5
"""The saving of an encoding, in forwards of the language model per token; every other object saves one."""

HEADS = frozenset(KINDS) - frozenset(PATCH_KINDS)
"""Kinds of object that are of use by themselves."""


class Victim(NamedTuple):
    """An object that is to leave, and why."""

    object: Weighed
    reason: str


def recompute_value(row: Weighed, now: float) -> float:
    """Tokens whose recompute an object saves, weighted by its use up to ``now`` (seconds since 1970)."""
    tokens = row.tokens * (ENCODING_COST if row.kind == "encoding" else 1.0)
    uses = decay(1.0, row.created, now)
    if row.used is not None:
        uses += decay(row.uses, row.used, now)
    return tokens * uses


def last_use(row: Weighed) -> float:
    """Time at which an object was last used, or else made (seconds since 1970)."""
    return row.created if row.used is None else row.used


def choose(
    objects: Iterable[Weighed],
    pinned: Collection[str],
    max_bytes: int | None,
    now: float,
    by: Literal["value", "use"] = "value",
) -> Iterator[Victim]:
    """The objects that leave, in order, so that the rest is at most ``max_bytes`` (None: any number).

    ``by`` their value per byte, or their last use. ``pinned``: names that stay. If they are larger than
    ``max_bytes``, the limit is not reached.
    """
    groups: dict[tuple[str, ...], _Group] = {}
    total = 0
    for row in objects:
        groups.setdefault(row.group, _Group(by)).add(row, row.key in pinned, now)
        total += row.bytes
    for group in groups.values():
        group.encoding = None if group.head is None else groups.get(group.head.encoding)
        if group.encoding is not None:
            group.encoding.referring += 1
    for group in groups.values() if by == "value" else ():
        if group.head is None:
            for orphan in group.loose():
                group.take(orphan)
                total -= orphan.bytes
                yield Victim(orphan, "its canonical is gone")
    if max_bytes is None:
        return
    queue = [offer for group in groups.values() for offer in group.offers()]
    heapq.heapify(queue)
    while total > max_bytes and queue:
        *_, size, group, patch = heapq.heappop(queue)
        if patch is None:
            if size != len(group.values):
                continue  # a patch has left since: the group was offered again
            # the canonical last: an interruption leaves no patch without one
            rows = sorted(group.objects.values(), key=lambda row: row.kind in HEADS)
        elif patch.key in group.objects:
            rows = [patch]
        else:
            continue
        for row in rows:
            group.take(row)
            total -= row.bytes
            yield Victim(row, "least value per byte" if by == "value" else "least recently used")
        free = group if group.objects else group.encoding
        if free is not None and free is not group:
            free.referring -= 1
        if free is not None:
            for offer in free.whole():
                heapq.heappush(queue, offer)


@dataclass
class _Group:
    """A canonical and its patches; or an encoding, or an anchor, by itself."""

    by: str
    head: Weighed | None = None
    encoding: _Group | None = None
    referring: int = 0  # canonicals whose encoding it is
    has_pins: bool = False  # a member is pinned
    objects: dict[str, Weighed] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    bytes: int = 0
    value: float = 0.0

    def add(self, row: Weighed, pinned: bool, now: float) -> None:
        if row.kind in HEADS:
            self.head = row
        if pinned:
            self.has_pins = True
            self.pinned.add(row.key)
        self.objects[row.key] = row
        self.values[row.key] = recompute_value(row, now)
        self.bytes += row.bytes
        self.value += self.values[row.key]

    def take(self, row: Weighed) -> None:
        del self.objects[row.key]
        self.bytes -= row.bytes
        self.value -= self.values.pop(row.key)

    def loose(self) -> list[Weighed]:
        """Patches that may leave alone."""
        return [o for o in self.objects.values() if o.kind not in HEADS and o.key not in self.pinned]

    def offers(self) -> Iterator[_Offer]:
        """What may leave: each patch alone, and all together."""
        for patch in self.loose():
            worth = last_use(patch) if self.by == "use" else self.values[patch.key] / max(1, patch.bytes)
            yield worth, patch.created, patch.key, 1, self, patch
        yield from self.whole()

    def whole(self) -> Iterator[_Offer]:
        """The offer of all together, if they may leave."""
        if self.head is not None and not self.has_pins and not self.referring:
            worth = last_use(self.head) if self.by == "use" else self.value / max(1, self.bytes)
            yield worth, self.head.created, self.head.key, len(self.objects), self, None


_Offer = tuple[float, float, str, int, _Group, Weighed | None]
"""Worth, time and name, by which offers are sorted; a number of objects, their group, and the one patch."""
