"""The Gear rolling hash over token ids, computed for all positions at once.

``h[i] = (h[i-1] << 1) + g(t[i])`` in 32 bits: bit b of h[i] depends on the last b+1 tokens only, since older
ones are shifted out. So no state is needed: doubling gives the sum over the last 32 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
"""Token ids, or hashes of them, ``[tokens]``."""

Places = NDArray[np.int64]
"""Places between tokens, ascending: the one after the first token is 1."""

Bits = Literal["low", "high"]
"""The bits of a hash that have to be zero at a cut: its lowest or its highest."""

_BITS = 32
_BLOCK = 1 << 14  # 64 KiB per buffer, so that the passes stay in the second-level cache


def hash_window(exponent: int, bits: Bits) -> int:
    """Number of last tokens on which a cut depends."""
    return exponent if bits == "low" else _BITS


def candidates(ids: Ids, exponent: int, bits: Bits) -> Places:
    """Positions after a token at which ``exponent`` bits of the hash are zero: one in ``2**exponent``.

    Position p is after token p - 1. Positions with fewer than `hash_window` tokens before them depend on
    those. No position follows a token that repeats the one before it: a run has no content to cut by.
    """
    if not 1 <= exponent <= 16:
        raise ValueError(f"mask exponent {exponent} must be 1 to 16")
    mask = np.uint32((1 << exponent) - 1)
    if bits == "high":
        mask = np.uint32(int(mask) << (_BITS - exponent))
    parts = [np.zeros(0, np.int64)]
    for start, hashes in _blocks(ids, (hash_window(exponent, bits) - 1).bit_length()):
        parts.append(np.flatnonzero((hashes & mask) == 0).astype(np.int64) + start)
    ends = np.concatenate(parts)
    repeated = (ends > 0) & (ids[ends] == ids[np.maximum(ends - 1, 0)])
    return ends[~repeated] + 1


def gear(ids: Ids) -> Ids:
    """The hash after every token ``[tokens]``; from the 32nd on, a hash of the last 32."""
    blocks = [hashes for _, hashes in _blocks(ids, (_BITS - 1).bit_length())]
    return np.concatenate([np.zeros(0, np.uint32), *blocks])


def _blocks(ids: Ids, passes: int) -> Iterator[tuple[int, Ids]]:
    """The hashes of one block of tokens after another, each with its start."""
    for start in range(0, len(ids), _BLOCK):
        first = max(0, start - (1 << passes) + 1)
        yield start, _sums(_mix(ids[first : start + _BLOCK]), passes)[start - first :]


def _sums(hashes: Ids, passes: int) -> Ids:
    """``sum over j < 2**passes of hashes[i-j] << j``, computed in place."""
    reach = 1
    for _ in range(passes):
        addend = hashes[:-reach] << np.uint32(reach)
        hashes[reach:] += addend
        reach *= 2
    return hashes


def _mix(ids: Ids) -> Ids:
    """Each id through murmur3's finaliser: every output bit depends on every bit of the id."""
    hashes: Ids = ids ^ (ids >> np.uint32(16))
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
    return hashes
