"""Memory into which records are read: reused from records that are gone, or new.

The system zeroes memory at its first touch, which costs as much as reading it from the page cache; a
store that reads as many records as it forgets need not pay for that.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch

_LEAST, _MOST = 4 << 20, 128 << 20  # bytes; smaller slabs are cheap, larger ones are not kept
_free: deque[np.ndarray] = deque(maxlen=2)  # its methods are atomic: records are freed in any thread


def allocate_bytes(size: int) -> torch.Tensor:
    """``size`` uninitialised bytes, uint8; used again when no tensor and no view of them is left."""
    if not _LEAST <= size <= _MOST:
        return torch.from_numpy(np.empty(size, dtype=np.uint8))
    slab = _left_over(size)
    held = slab[:size]
    weakref.finalize(held, _free.append, slab).atexit = False
    return torch.from_numpy(held)


def _left_over(size: int) -> np.ndarray:
    while _free:
        try:
            slab = _free.popleft()
        except IndexError:  # another thread was faster
            break
        if size <= slab.nbytes <= 2 * size:
            return slab
    # numpy asks for huge pages, torch does not: fewer pages are touched
    return np.empty(size, dtype=np.uint8)
