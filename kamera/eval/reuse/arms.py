"""Controls and Kamera's own arms of the benchmark of reuse.

| arm | serves |
|---|---|
| ``exact`` | the window prefilled anew from encodings: the reference |
| ``prefix`` | the KV of the units that the last window began with, the rest prefilled (a prefix cache) |
| ``blind`` | canonicals, relocated |
| ``keep`` | a `KameraWindow`: units that stay are survivors, arrivals take a stored patch or a forward |
| ``repair`` | a `KameraWindow`: whatever stands behind a change takes a stored patch or a forward |
| ``patch@M`` | canonicals with the rank-M patch of the window asked about, prepared in advance |
| ``random-patch@M`` | the same with random patches of equal norm: sabotage |
| ``other-patch@M`` | the same with each unit under another unit's patch: sabotage |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kamera.eval.adapter import Maker
from kamera.eval.reuse.patched import OtherPatched, Patched, RandomPatched
from kamera.eval.reuse.plain import BLIND, EXACT, Blind, Exact, Prefix
from kamera.eval.reuse.windowed import Windowed

SABOTAGE = ("random-patch", "other-patch")
"""Arms that serve wrong patches: a benchmark on which one passes for ``patch`` measures nothing."""

DEFAULT = "exact,prefix,blind,keep,repair,patch@16,random-patch@16,other-patch@16"

_PLAIN: Mapping[str, Maker] = {
    EXACT: Exact,
    "prefix": Prefix,
    BLIND: Blind,
    "keep": lambda desk: Windowed(desk, "keep", "keep"),
    "repair": lambda desk: Windowed(desk, "repair", "repair"),
}
_RANKED = {"patch": Patched, "random-patch": RandomPatched, "other-patch": OtherPatched}


def arms_named(names: Sequence[str], others: Mapping[str, Maker] | None = None) -> dict[str, Maker]:
    """Makers by arm name: the arms of this module, and ``others`` (`kamera.eval.adapter.arms_of`).

    Raises ValueError, with the list, for an unknown name, one given twice, and a list without ``exact``.
    """
    others = others or {}
    known = [*_PLAIN, *(f"{name}@RANK" for name in _RANKED), *others]
    if not names or len(set(names)) < len(names) or EXACT not in names:
        raise ValueError(f"arms {', '.join(names) or '(none)'}: give {EXACT}, and each other at most once")
    return {name: _maker(name, others, known) for name in names}


def _maker(name: str, others: Mapping[str, Maker], known: Sequence[str]) -> Maker:
    if name in _PLAIN:
        return _PLAIN[name]
    if name in others:
        return others[name]
    match = re.fullmatch(r"([a-z-]+)@([1-9]\d*)", name)
    if match is None or match[1] not in _RANKED:
        raise ValueError(f"arm {name!r} is none of {', '.join(known)}")
    cls, rank = _RANKED[match[1]], int(match[2])
    return lambda desk: cls(desk, name, rank)
