"""Search for stored windows of 32 tokens at every position of a prompt, in the pass that finds its cuts.

The 32-bit Gear hash *is* a hash of the last 32 tokens. A bit table marks the positions of a prompt that may
end a stored window; the caller compares the tokens of those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kamera.reuse.gear import gear
from kamera.reuse.prompt import Ids, Places

WINDOW = 32
"""Tokens of a window: the hash's window."""

_ROOM = 64  # slots of the table per hash: one look-up in 64 is a false positive
_SMALLEST = 16
_LARGEST = 27  # bits of the table's size: 128 MiB, full at two million windows


class Scan:
    """Hashes of stored windows."""

    def __init__(self) -> None:
        self._hashes: list[Ids] = []
        self._count = 0
        self._bits = _SMALLEST
        self._marked: NDArray[np.bool_] = np.zeros(1 << _SMALLEST, bool)

    def add(self, ids: Ids, starts: Places) -> None:
        """Add the windows of ``ids`` that begin at ``starts``."""
        hashes = gear(ids)[starts + WINDOW - 1]
        self._hashes.append(hashes)
        self._count += len(hashes)
        if self._count * _ROOM > 1 << self._bits < 1 << _LARGEST:
            self._bits = min(_LARGEST, (self._count * _ROOM).bit_length())
            self._marked = np.zeros(1 << self._bits, bool)
            self._hashes = [np.concatenate(self._hashes)]
            hashes = self._hashes[0]
        self._marked[self._slots(hashes)] = True

    def candidates(self, ids: Ids) -> Places:
        """Starts of windows of ``ids`` that may be stored: every stored one and a few false positives."""
        if len(ids) < WINDOW:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self._marked[self._slots(gear(ids)[WINDOW - 1 :])])

    def _slots(self, hashes: Ids) -> Ids:
        return hashes >> np.uint32(32 - self._bits)  # the high bits depend on all of the window
