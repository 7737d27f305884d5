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
    """Segments numbered from 0 in the order of addition."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, list[int]] = {}
        self._contents: dict[int, Content] = {}
        self._uses: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, number: int) -> Content:
        return self._contents[number]

    def find(self, content: Content) -> int | None:
        """The number of the segment with equal tokens and media, or None.

        A segment of equal hash and different tokens is not a match.
        """
        same = self._numbers.get(content_key(content), ())
        return next((number for number in same if self._contents[number] == content), None)

    def add(self, content: Content) -> int:
        """The number of ``content``, added if it is new; each call is one use (`release`)."""
        number = self.find(content)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers.setdefault(content_key(content), []).append(number)
            self._contents[number] = content
        self._uses[number] = self._uses.get(number, 0) + 1
        return number

    def release(self, number: int) -> bool:
        """End one use; True if it was the last, and the segment is gone."""
        self._uses[number] -= 1
        if self._uses[number]:
            return False
        key = content_key(self._contents.pop(number))
        self._numbers[key].remove(number)
        if not self._numbers[key]:
            del self._numbers[key]
        del self._uses[number]
        return True


def content_key(content: Content) -> bytes:
    """xxh3-128 of ids and media. Not collision-resistant: compare the tokens after a look-up."""
    ids = content.ids + content.media.encode() if content.media else content.ids
    return xxh3_128_digest(ids)
