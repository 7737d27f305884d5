"""The cuts of `kamera.reuse.prompt` in plain Python, one token after the other: slow, obvious, the oracle."""

from __future__ import annotations

from collections.abc import Sequence

_WORD = 2**32 - 1


def plain_cuts(
    ids: Sequence[int],
    *,
    minimum: int = 32,
    maximum: int = 512,
    exponent: int = 7,
    bits: str = "high",
    resets: Sequence[int] = (),
) -> list[int]:
    """Boundaries of ``ids``; the hash begins anew at every boundary, as the clamp allows."""
    mask = (1 << exponent) - 1
    if bits == "high":
        mask <<= 32 - exponent
    cuts = [0]
    state = 0
    for place, token in enumerate(ids):
        if place in resets and place != cuts[-1]:
            cuts.append(place)
        if place == cuts[-1]:
            state = 0
        state = ((state << 1) + _mixed(token)) & _WORD
        length = place + 1 - cuts[-1]
        repeats = place > 0 and ids[place - 1] == token
        by_content = length >= minimum and state & mask == 0 and not repeats
        if (by_content or length == maximum) and place + 1 < len(ids):
            cuts.append(place + 1)
    if ids:
        cuts.append(len(ids))
    return cuts


def _mixed(token: int) -> int:
    token ^= token >> 16
    token = token * 0x85EBCA6B & _WORD
    token ^= token >> 13
    token = token * 0xC2B2AE35 & _WORD
    return token ^ token >> 16
