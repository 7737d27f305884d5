"""Rules by which prompts are cut, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from kamera.content import EXPONENT, LONGEST, SHORTEST, Bits, hash_window

Kind = Literal["content", "fixed"]


@dataclass(frozen=True)
class CutRule:
    """Rule for the borders of segments.

    ``kind``: by content (Gear), or every ``maximum`` tokens. Segments have ``minimum`` to ``maximum`` tokens;
    only the last before a reset may be shorter, and media spans are never cut. At a cut ``exponent`` bits of
    the hash are zero (mean segment ``minimum + 2**exponent``), its ``low`` or its ``high`` ones.

    A segment always ends at a reset: media, and, if enabled, ``anchors`` (messages), ``spans`` (given
    structure) and both ends of every ``marker`` (token ids that the prompt's author inserted).

    Raises `ValueError` unless 1 <= minimum <= maximum and ``minimum`` is at least `hash_window`, so that a
    segment's end does not depend on the tokens before it.
    """

    kind: Kind = "content"
    minimum: int = SHORTEST
    maximum: int = LONGEST
    exponent: int = EXPONENT
    bits: Bits = "high"
    anchors: bool = True
    spans: bool = True
    marker: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"minimum {self.minimum} must be 1 to the maximum of {self.maximum} tokens")
        if self.kind == "content" and self.minimum < hash_window(self.exponent, self.bits):
            raise ValueError(
                f"minimum {self.minimum} is less than the {hash_window(self.exponent, self.bits)} tokens of "
                f"the hash's {self.bits} bits: a cut would depend on tokens before its segment"
            )


_PLAIN = CutRule(anchors=False, spans=False)

RULES: Mapping[str, CutRule] = MappingProxyType(
    {
        "fixed": replace(_PLAIN, kind="fixed", minimum=64, maximum=64),
        "low": replace(_PLAIN, bits="low"),
        "high": _PLAIN,
        "anchors": CutRule(),
    }
)
"""Rules by their names. Those with anchors use resets."""

DEFAULT_RULE = "anchors"
"""The rule that recovers most: docs/sessions.md, section Measured."""
