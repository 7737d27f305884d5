"""Windows of 32 tokens looked for at every place of a prompt, in the one pass that finds its cuts.

The 32-bit Gear hash *is* a hash of the last 32 tokens. A table of bits says which of a prompt's places may
end a window that is stored; the caller compares the tokens of those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kamera.reuse.gear import gear
from kamera.reuse.prompt import Ids, Places

WINDOW = 32
"""Tokens of a window: what the hash sees."""

_ROOM = 64  # places in the table for each hash in it: one look-up in 64 finds what is not there
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
        """Take in the windows of ``ids`` that begin at ``starts``."""
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
        """Starts of windows of ``ids`` that may be stored: all that are, and a few that are not."""
        if len(ids) < WINDOW:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self._marked[self._slots(gear(ids)[WINDOW - 1 :])])

    def _slots(self, hashes: Ids) -> Ids:
        return hashes >> np.uint32(32 - self._bits)  # the high bits have seen all of the window
