"""Memory that records are read into: taken over from records that are gone, or new.

The system zeroes what is touched for the first time, which costs as much as reading it from the page
cache; a store that reads as many records as it forgets need not pay for that.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch

_LEAST, _MOST = 4 << 20, 128 << 20  # bytes; smaller ones come cheap, larger ones are not held back
_free: deque[np.ndarray] = deque(maxlen=2)  # its methods are atomic: records end in any thread


def allocated(size: int) -> torch.Tensor:
    """``size`` bytes of anything, uint8.

    They are taken over by another call only when no tensor and no view of them is left.
    """
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
    # numpy asks for huge pages, torch does not: there are fewer of them to touch
    return np.empty(size, dtype=np.uint8)
