"""The arms of every benchmark: controls, Kamera's own, and those of other modules.

| arm | serves |
|---|---|
| ``reprefill`` | the window prefilled anew behind its leading unit, exact as stored: the reference |
| ``native`` | no window: the unsplit prompt through the model, without Kamera |
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from kamera.eval.adapter import Adapter
from kamera.eval.arms.native import Native
from kamera.eval.arms.patched import OtherPatched, Patched, RandomPatched
from kamera.eval.arms.plain import Blind, Exact, Prefix
from kamera.eval.arms.windowed import Windowed
from kamera.eval.desk import Desk

Maker = Callable[[Desk], Adapter]
"""A new adapter on a desk (the model, its system prompt, encodings so far)."""

REPREFILL, BLIND, NATIVE = "reprefill", "blind", "native"
SABOTAGE = ("random-patch", "other-patch")
"""Arms that serve wrong patches: a benchmark on which one passes for ``patch`` measures nothing."""

_PLAIN: Mapping[str, Maker] = {
    REPREFILL: Exact,
    NATIVE: Native,
    BLIND: Blind,
    "prefix": Prefix,
    "keep": partial(Windowed, on_leave="keep"),
    "repair": partial(Windowed, on_leave="repair"),
}
_RANKED = {"patch": Patched, "random-patch": RandomPatched, "other-patch": OtherPatched}

__all__ = [
    "BLIND",
    "NATIVE",
    "REPREFILL",
    "SABOTAGE",
    "Blind",
    "Exact",
    "Maker",
    "Prefix",
    "arms_named",
    "arms_of",
]


def arms_named(names: Sequence[str], others: Mapping[str, Maker] | None = None) -> dict[str, Maker]:
    """Makers by arm name: the arms of this module, and ``others`` (`arms_of`).

    Raises ValueError, with the list, for an unknown name, one given twice, and no name at all.
    """
    plain = {**_PLAIN, **(others or {})}
    known = ", ".join([*plain, *(f"{name}@RANK" for name in _RANKED)])
    if not names or len(set(names)) < len(names):
        raise ValueError(f"arms {', '.join(names) or '(none)'}: give each of {known} at most once")
    return {name: plain.get(name) or _maker_with_rank(name, known) for name in names}


def _maker_with_rank(name: str, known: str) -> Maker:
    match = re.fullmatch(r"([a-z-]+)@([1-9]\d*)", name)
    if match is None or match[1] not in _RANKED:
        raise ValueError(f"arm {name!r} is none of {known}")
    return partial(_RANKED[match[1]], rank=int(match[2]))


def arms_of(modules: Sequence[str]) -> dict[str, Maker]:
    """The arms of modules given by name: each has ``ARMS``, a mapping of names to `Maker`.

    Raises ValueError for a module that cannot be imported, has no ``ARMS``, or repeats a name.
    """
    found: dict[str, Maker] = {}
    for name in modules:
        try:
            module = import_module(name)
        except ImportError as error:
            raise ValueError(f"arm module {name!r} cannot be imported: {error}") from None
        arms = getattr(module, "ARMS", None)
        if not isinstance(arms, Mapping):
            raise ValueError(f"arm module {name!r} has no ARMS: give a mapping of arm names to makers")
        if twice := sorted(found.keys() & arms.keys()):
            raise ValueError(f"arm {twice[0]!r} of module {name!r} is another module's too: rename it")
        found |= arms
    return found
