"""Distinct segments by content: found by a fast hash, then compared token by token."""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_128_digest


class Content(NamedTuple):
    """Identity of a segment: token ids (4 bytes each, little-endian) and the media's digest."""

    ids: bytes
    media: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // 4


class SegmentTable:
    """Segments numbered from 0 in the order of addition. ``seed`` separates the hashes of scopes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[bytes, list[int]] = {}
        self._contents: list[Content] = []

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, number: int) -> Content:
        return self._contents[number]

    def find(self, content: Content) -> int | None:
        """The number of the segment with equal tokens and media, or None.

        A segment of equal hash and different tokens is not a match.
        """
        for number in self._numbers.get(identity(content, self._seed), ()):
            if self._contents[number] == content:
                return number
        return None

    def add(self, content: Content) -> int:
        """The number of ``content``, added if it is new."""
        known = self._numbers.setdefault(identity(content, self._seed), [])
        for number in known:
            if self._contents[number] == content:
                return number
        known.append(len(self._contents))
        self._contents.append(content)
        return known[-1]


def identity(content: Content, seed: int) -> bytes:
    """xxh3-128 of ids and media. Not collision-resistant: compare the tokens after a look-up."""
    ids = content.ids + content.media.encode() if content.media else content.ids
    return xxh3_128_digest(ids, seed)
