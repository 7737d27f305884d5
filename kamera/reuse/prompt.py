"""A prompt: token ids, positions of its messages, pictures and given spans, and the borders it is cut at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from kamera.content import (
    EXPONENT,
    LONGEST,
    SHORTEST,
    Bits,
    Ids,
    LandmarkReader,
    Places,
    candidates,
    hash_window,
    text_borders,
)
from kamera.errors import UnidentifiedMedia

_LARGEST = 2**32 - 1


@dataclass(frozen=True)
class Media:
    """Tokens ``start`` to ``stop`` are a picture or clip whose bytes have ``digest``."""

    start: int
    stop: int
    digest: str


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``stop`` are one unit of structure: a tool's specification, a preamble."""

    start: int
    stop: int
    name: str = ""


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids with their known structure.

    ``anchors`` are the starts of messages (position p is before token p). ``media`` spans are in order and do
    not overlap; ``spans`` may. Build one with `Prompt.of`, which checks all of it.
    """

    ids: Ids
    anchors: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    spans: tuple[Span, ...] = ()
    raw: bytes = field(default=b"", repr=False)
    """The ids as 4 bytes each, little-endian, for hashing and comparison."""

    @classmethod
    def of(
        cls,
        ids: ArrayLike,
        *,
        anchors: Sequence[int] = (),
        media: Sequence[Media] = (),
        spans: Sequence[Span] = (),
        placeholders: Collection[int] = (),
    ) -> Prompt:
        """A prompt of ``ids`` ``[tokens]``, integers of 0 to 2**32 - 1.

        ``placeholders`` are the ids of media placeholders. Raises `UnidentifiedMedia` for one outside every
        media span, since equal placeholders may be different pictures, and `ValueError` for positions outside
        the prompt, overlapping media, or invalid ids.
        """
        tokens = _ids(ids)
        total = len(tokens)
        items = tuple(sorted(media, key=lambda m: m.start))
        ranges: tuple[Media | Span, ...] = (*items, *spans)
        for one in ranges:
            if not 0 <= one.start < one.stop <= total:
                raise ValueError(f"{one} is not within a prompt of {total} tokens")
        for left, right in pairwise(items):
            if right.start < left.stop:
                raise ValueError(f"media spans overlap: {left} and {right}")
        for one in items:
            if not one.digest:
                raise UnidentifiedMedia(f"media at tokens {one.start} to {one.stop} has no digest: give one")
        wrong = next((a for a in anchors if not 0 <= a <= total), None)
        if wrong is not None:
            raise ValueError(f"anchor {wrong} is not within a prompt of {total} tokens")
        if placeholders:
            _check_placeholders(tokens, items, placeholders)
        return cls(tokens, tuple(sorted(set(anchors))), items, tuple(spans), tokens.tobytes())

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> bytes:
        """The ids of tokens ``start`` to ``stop``, 4 bytes each."""
        return self.raw[4 * start : 4 * stop]


def _ids(ids: ArrayLike) -> Ids:
    tokens = np.asarray(ids)
    if tokens.size == 0:
        return np.zeros(0, "<u4")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers [tokens], got {tokens.dtype} {tokens.shape}")
    if tokens.dtype != np.uint32 and (tokens.min() < 0 or tokens.max() > _LARGEST):
        raise ValueError(f"token ids must be 0 to {_LARGEST}, got {tokens.min()} to {tokens.max()}")
    return np.ascontiguousarray(tokens, "<u4")


def _check_placeholders(tokens: Ids, media: tuple[Media, ...], placeholders: Collection[int]) -> None:
    mask = np.isin(tokens, np.fromiter(placeholders, np.int64))
    for one in media:
        mask[one.start : one.stop] = False
    if mask.any():
        place = int(mask.argmax())
        raise UnidentifiedMedia(
            f"token {int(tokens[place])} at {place} is a placeholder of media of which no digest was "
            "given: pass media=[Media(start, stop, digest), …]"
        )


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
"""The rule that recovers most (docs/benchmarks.md)."""


def cut_prompt(
    prompt: Prompt, rule: CutRule, kept: Sequence[tuple[int, int]] = (), edges: Sequence[int] = ()
) -> list[int]:
    """The boundaries of ``prompt``'s segments in order, 0 and its length among them.

    Segment i is tokens ``cuts[i]`` to ``cuts[i + 1]``; together they are the prompt. The end of a segment
    depends on its own tokens and the resets alone. An empty prompt has the one boundary 0. ``edges`` are
    further resets; spans that are ``kept``, apart and none across a reset, are segments as they are.
    """
    whole = {*(m.start for m in prompt.media), *(start for start, _ in kept)}
    resets = sorted({*fixed_cuts(prompt, rule), *edges, *(edge for span in kept for edge in span)})
    places = candidates(prompt.ids, rule.exponent, rule.bits).tolist() if rule.kind == "content" else []
    cuts = [0]
    for start, stop in pairwise(resets):
        if start not in whole:  # a picture, or a segment that came before
            cuts += text_borders(places, start, stop, shortest=rule.minimum, longest=rule.maximum)
        cuts.append(stop)
    return cuts


def fixed_cuts(prompt: Prompt, rule: CutRule) -> list[int]:
    """The boundaries independent of content, in order: both ends, media, and the rule's resets."""
    total = len(prompt)
    places = {0, total}
    if rule.anchors:
        places.update(prompt.anchors)
    if rule.spans:
        places.update(edge for span in prompt.spans for edge in (span.start, span.stop))
    if rule.marker:
        for start in occurrences(prompt.ids, rule.marker).tolist():
            places.update((start, start + len(rule.marker)))
    for one in prompt.media:  # no rule cuts a picture
        places.difference_update(range(one.start + 1, one.stop))
        places.update((one.start, one.stop))
    return sorted(places)


def occurrences(ids: Ids, marker: tuple[int, ...]) -> Places:
    """Starts of ``marker`` in ``ids``; of two that overlap, both."""
    room = len(ids) - len(marker) + 1
    if room < 1:
        return np.zeros(0, np.int64)
    places = np.flatnonzero(ids[:room] == marker[0])
    for offset, token in enumerate(marker[1:], start=1):
        places = places[ids[places + offset] == token]
    return places


def anchors_of(model: Any, ids: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
    """Positions in ``ids`` ``[tokens]`` where messages start, and where pictures and clips start and end.

    ``model`` is a backbone, or its processor or tokenizer. They are the ``anchors`` of a `Prompt`, and are
    borders of the segments that the same conversation has as messages. A template that opens turns with
    words, not with a token of its own, gives no starts of messages. Raises ProcessorRequired without a
    template.
    """
    processor = model.processor if callable(getattr(model, "prefill", None)) else model
    return LandmarkReader(processor).of(torch.as_tensor(ids).tolist()).borders
