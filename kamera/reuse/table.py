"""Distinct segments by content: found by a fast hash, believed only after their tokens were compared."""

from __future__ import annotations

from typing import NamedTuple

from xxhash import xxh3_128_digest


class Content(NamedTuple):
    """What makes two segments the same: token ids (4 bytes each, little-endian) and the media's digest."""

    ids: bytes
    media: str = ""

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.ids) // 4


class SegmentTable:
    """Segments numbered from 0 as they came. ``seed`` parts the hashes of one scope from another's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[bytes, list[int]] = {}
        self._contents: list[Content] = []

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, number: int) -> Content:
        return self._contents[number]

    def find(self, content: Content) -> int | None:
        """The number of the segment with these very tokens and media; None if it was not seen.

        A segment that shares the hash and not the tokens is another segment.
        """
        for number in self._numbers.get(identity(content, self._seed), ()):
            if self._contents[number] == content:
                return number
        return None

    def add(self, content: Content) -> int:
        """The number of ``content``, a new one if it was not seen."""
        known = self._numbers.setdefault(identity(content, self._seed), [])
        for number in known:
            if self._contents[number] == content:
                return number
        known.append(len(self._contents))
        self._contents.append(content)
        return known[-1]


def identity(content: Content, seed: int) -> bytes:
    """xxh3-128 of ids and media. Not for adversaries: who looks up by it compares the tokens."""
    ids = content.ids + content.media.encode() if content.media else content.ids
    return xxh3_128_digest(ids, seed)
