"""Sizes and times, as numbers or as people write them."""

from __future__ import annotations

import math
import re

from kamera.errors import quote

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]i?)?B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes of ``4096``, ``"512MiB"``, ``"4GiB"`` or ``"1GB"``.

    Raises `ValueError` for anything else, which it calls ``name``.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"{name} {quote(size)} is no size: give bytes, or text such as '4GiB'")
    number, unit = match.group(1), (match.group(2) or "").upper()
    base = 1024 if unit.endswith("I") else 1000
    return int(float(number) * base ** " KMGT".index(unit[:1] or " "))


def parse_duration(duration: float | str) -> float:
    """Seconds of ``90``, ``"30m"``, ``"12h"`` or ``"7d"``. Raises `ValueError` for anything else."""
    match = _DURATION.fullmatch(duration.strip()) if isinstance(duration, str) else None
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
    seconds = float(duration) if is_number else float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{quote(duration)} is no time: give seconds, or text such as '30m', '12h', '7d'")
    return seconds
