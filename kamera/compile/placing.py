"""The windows of a trace as their chunks arrived, and as `kamera.window.Assemble` places them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path as FilePath

from kamera.compile.mine import operations
from kamera.compile.trie import Path
from kamera.store import ObjectInfo
from kamera.window import Event, NamedRows


@dataclass(frozen=True)
class Placed:
    """A window of a trace: its chunks as they arrived and as they are placed, and what each order runs."""

    arrived: Path
    placed: Path
    arrived_forwards: int
    arrived_tokens: int
    placed_forwards: int
    placed_tokens: int


def place(
    path: str | FilePath, *, anchor: str | None = None, rows: Sequence[ObjectInfo] = ()
) -> list[Placed]:
    """The windows of a trace, each put together out of what is stored by then, in both orders.

    A window is what an operation left that placed chunks anew, unless the next line's window begins with it.
    Each leaves the canonicals and patches of its order, arrived and placed ones each for their own kind; both
    begin with what ``rows`` of a store hold behind the same anchor. Chunks run one forward each. ``anchor``
    and errors as in `mine`.
    """
    events = operations(path, anchor)
    arrivals, placements = NamedRows(), NamedRows()
    for known in (arrivals, placements):
        known.take(row for row in rows if events and row.context.anchor == events[0].anchor)
    made = []
    for event in _whole(events):
        tokens = {slot.chunk_id: slot.length for slot in event.report.slots}
        old, new = arrivals.assembled(tokens, "given"), placements.assembled(tokens, "free")
        arrivals.keep(old.order)
        placements.keep(new.order)
        runs = (old.cost.forwards, old.cost.tokens, new.cost.forwards, new.cost.tokens)
        made.append(Placed(old.order, new.order, *runs))
    return made


def _whole(events: Sequence[Event]) -> Iterator[Event]:
    """The operations whose window had chunks placed into it, the last of each that grew."""
    new = False
    for event, following in zip_longest(events, events[1:]):
        chunks = _chunks(event)
        new = new or event.placed < len(chunks)
        grows = following is not None and _chunks(following)[: len(chunks)] == chunks
        if new and not grows:
            yield event
        new = new and grows


def _chunks(event: Event) -> Path:
    return tuple(slot.chunk_id for slot in event.report.slots)
