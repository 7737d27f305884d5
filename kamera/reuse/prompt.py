"""A prompt: token ids, and the positions of its messages, pictures and given spans."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from kamera.content import Ids
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
        for left, right in itertools.pairwise(items):
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
