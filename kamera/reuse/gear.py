"""The Gear rolling hash over token ids, all places at once.

``h[i] = (h[i-1] << 1) + g(t[i])`` in 32 bits: bit b of h[i] depends on the last b+1 tokens and no others,
for what is older has been shifted out. Hence no state: the sum over the last 32 tokens is taken by doubling.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from kamera.reuse.prompt import Ids, Places

Bits = Literal["low", "high"]

_BITS = 32
_BLOCK = 1 << 14  # 64 KiB a buffer: the passes stay in the second-level cache


def sight(exponent: int, bits: Bits) -> int:
    """How many of the last tokens decide whether a cut may fall."""
    return exponent if bits == "low" else _BITS


def candidates(ids: Ids, exponent: int, bits: Bits) -> Places:
    """Places behind a token at which ``exponent`` bits of the hash are zero: one in ``2**exponent``.

    A place p lies behind token p - 1. Places that see fewer than `sight` tokens are judged by those there
    are. A token that repeats the one before it is never cut behind: a run has no content to cut by.
    """
    if not 1 <= exponent <= 16:
        raise ValueError(f"mask exponent {exponent} must be 1 to 16")
    mask = np.uint32((1 << exponent) - 1)
    if bits == "high":
        mask = np.uint32(int(mask) << (_BITS - exponent))
    passes = (sight(exponent, bits) - 1).bit_length()
    before = (1 << passes) - 1
    found = []
    for start in range(0, len(ids), _BLOCK):
        first = max(0, start - before)
        hashes = _sums(_mixed(ids[first : start + _BLOCK]), passes)
        hits = np.flatnonzero((hashes[start - first :] & mask) == 0)
        found.append(hits.astype(np.int64) + start)
    ends = np.concatenate(found) if found else np.zeros(0, np.int64)
    repeated = (ends > 0) & (ids[ends] == ids[np.maximum(ends - 1, 0)])
    return ends[~repeated] + 1


def gear(ids: Ids) -> Ids:
    """The hash behind every token ``[tokens]``; from the 32nd on, a hash of the last 32."""
    passes = (_BITS - 1).bit_length()
    before = (1 << passes) - 1
    hashes = np.empty(len(ids), np.uint32)
    for start in range(0, len(ids), _BLOCK):
        first = max(0, start - before)
        stop = min(start + _BLOCK, len(ids))
        hashes[start:stop] = _sums(_mixed(ids[first:stop]), passes)[start - first :]
    return hashes


def _sums(hashes: Ids, passes: int) -> Ids:
    """``sum over j < 2**passes of hashes[i-j] << j``, in place of ``hashes``."""
    reach = 1
    for _ in range(passes):
        shifted = hashes[:-reach] << np.uint32(reach)
        hashes[reach:] += shifted
        reach *= 2
    return hashes


def _mixed(ids: Ids) -> Ids:
    """Each id through murmur3's finaliser: every bit of it depends on every bit of the id."""
    mixed: Ids = ids ^ (ids >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
