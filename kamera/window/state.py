"""The state that an operation replaces as a whole, so an error leaves the old one in place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

from kamera.errors import InvalidPermutation, UnknownSlot, quote
from kamera.patches import Guarantee
from kamera.window.seats import Seats
from kamera.window.slots import Resident, Slot


@dataclass(frozen=True, eq=False)
class WindowState:
    """The chunks of a window in order.

    ``shift`` (per axis) is the offset of the next chunk from its compact place: zero unless a slide kept
    positions and so left a gap in front.

    ``frame`` (per axis) is the offset of the live KV of anchor and chunks, and of the questions behind it,
    from the window's own positions. Attention depends on differences of positions only, so a frame changes
    only which keys have to be rotated: when the oldest chunk leaves, the anchor moves up to the survivors,
    and none of them moves.

    ``said`` is the last question and its answer, right behind the chunks: no chunk, but the next text that
    begins with the same tokens takes over their KV. Any change of the window drops it.
    """

    residents: tuple[Resident, ...]
    shift: tuple[int, ...]
    frame: tuple[int, ...]
    said: Resident | None = None

    @classmethod
    def of(cls, residents: Sequence[Resident], axes: int) -> WindowState:
        """Chunks at compact positions: no gap, no frame."""
        return cls(tuple(residents), (0,) * axes, (0,) * axes)

    @property
    def residents_by_number(self) -> dict[int, Resident]:
        """The chunks by their numbers."""
        return {r.seat.number: r for r in self.residents}

    @cached_property
    def _places(self) -> dict[int, int]:
        return {resident.seat.number: i for i, resident in enumerate(self.residents)}

    @cached_property
    def seats(self) -> Seats:
        """The same state without tensors."""
        said = None if self.said is None else self.said.seat
        return Seats(tuple([r.seat for r in self.residents]), self.shift, self.frame, said)

    def saying(self, said: Resident) -> WindowState:
        """The same chunks with ``said`` behind them."""
        made = WindowState(self.residents, self.shift, self.frame, said)
        made.__dict__["seats"] = self.seats.saying(said.seat)
        return made

    @property
    def chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks in order."""
        return self.seats.chunk_ids

    @property
    def worths(self) -> tuple[Guarantee, ...]:
        """The present guarantee of each chunk."""
        return self.seats.worths

    def slots(self, anchor_length: int, bytes_per_token: int) -> tuple[Slot, ...]:
        """The public view, in order."""
        start, out, worths = anchor_length, [], self.worths
        for i, resident in enumerate(self.residents):
            out.append(resident.slot(start, worths[i], i == 0, self.frame[0], bytes_per_token))
            start += resident.seat.length
        return tuple(out)

    def index(self, slot: Slot | int) -> int:
        """Index of a slot among the chunks. Raises UnknownSlot if it is not one of them."""
        count = len(self.residents)
        if not count:
            raise UnknownSlot("the window is empty, it has no slots: append or recall a chunk first")
        if isinstance(slot, Slot):
            if (i := self._places.get(slot.number)) is not None:
                return i
            raise UnknownSlot(
                f"slot {slot.number} (chunk {slot.chunk_id[:12]}) is not in this window: it has left; "
                "use recall(chunk_id)"
            )
        if not isinstance(slot, int) or isinstance(slot, bool):
            raise UnknownSlot(f"{quote(slot)} is no slot: give a Slot of this window or its index")
        if not -count <= slot < count:
            raise UnknownSlot(f"slot {slot} of a window of {count}: give 0..{count - 1}")
        return slot % count


def indices(permutation: Iterable[SupportsIndex]) -> list[int]:
    """Whole numbers out of any sequence of them (a list, an array). Raises InvalidPermutation for others."""
    try:
        given = list(permutation)
    except TypeError:
        raise InvalidPermutation(f"{quote(permutation)} is no permutation: give a list of indices") from None
    found = []
    for i in given:
        try:
            if isinstance(i, bool) or isinstance(permutation, bytes):
                raise TypeError
            found.append(operator.index(i))
        except TypeError:
            raise InvalidPermutation(f"{quote(i)} in a permutation is no index: give whole numbers") from None
    return found
