"""Search for stored windows of 32 tokens at every position of a prompt, in one pass over it.

The 32-bit Gear hash *is* a hash of the last 32 tokens. A bit table marks the positions of a prompt that may
end a stored window; the caller compares the tokens around those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kamera.content import Ids, Places, gear

WINDOW = 32
"""Tokens of a window: the hash's window."""

MOST = 8
"""Places of equal windows that are kept, the last ones: each may go on in another way."""

Place = tuple[int, int]
"""A node, and the token of its segment before which a window ends."""

_ROOM = 16  # slots of the table per hash: one look-up in 16 is a false positive, which the places refuse
_SMALLEST = 16
_LARGEST = 27  # bits of the table's size: 128 MiB, full at eight million windows


class Scan:
    """Places of stored windows by the hash of their tokens."""

    def __init__(self) -> None:
        self._places: dict[int, list[Place]] = {}
        self._marks: NDArray[np.bool_] = np.zeros(1 << _SMALLEST, bool)
        self._bits = _SMALLEST

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._marks.nbytes

    def add(self, hashes: Ids, places: Iterable[Place]) -> None:
        """Add windows; of more than `MOST` equal ones the first go."""
        for value, place in zip(hashes.tolist(), places, strict=True):
            bucket = self._places.setdefault(value, [])
            bucket.append(place)
            del bucket[:-MOST]
        if len(self._places) * _ROOM > len(self._marks) and self._bits < _LARGEST:
            self._bits = min(_LARGEST, (len(self._places) * _ROOM).bit_length())
            self._marks = np.zeros(1 << self._bits, bool)
            hashes = np.fromiter(self._places, np.uint32, len(self._places))
        self._marks[self._slots(hashes)] = True

    def remove(self, hashes: Ids, node: int) -> None:
        """Remove a node's windows. Their marks stay: they are false positives from then on."""
        for value in hashes.tolist():
            rest = [place for place in self._places.get(value, ()) if place[0] != node]
            if rest:
                self._places[value] = rest
            else:
                self._places.pop(value, None)

    def candidates(self, ids: Ids) -> Iterator[tuple[int, list[Place]]]:
        """Stops of windows of ``ids`` whose hash is stored, in order, with the places of that hash."""
        if len(ids) < WINDOW:
            return
        hashes = gear(ids)
        for stop in (np.flatnonzero(self._marks[self._slots(hashes[WINDOW - 1 :])]) + WINDOW).tolist():
            places = self._places.get(int(hashes[stop - 1]))
            if places:
                yield stop, places

    def _slots(self, hashes: Ids) -> Ids:
        return hashes >> np.uint32(32 - self._bits)  # the high bits depend on all of the window


def window_stops(start: int, stop: int) -> Places:
    """Stops in ``start`` (excluded) to ``stop`` of the windows of a text, counted from where it begins.

    Windows follow each other without a gap, so any 63 tokens of a text hold a whole one.
    """
    first = max(1, start // WINDOW + 1) * WINDOW
    return np.arange(first, stop + 1, WINDOW)
