"""A radix tree of token ids: found by what a text begins with, one step per branch and not per string."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kamera.content import Ids


class Along(NamedTuple):
    """Strings met along a text: ``values`` of those that it begins with, the shortest first.

    ``common`` tokens are shared with some string, that of ``value``; None if there is none.
    """

    values: tuple[int, ...]
    common: int
    value: int | None


class Radix:
    """Strings of token ids (4 bytes each, little-endian), each with a number. No string is empty."""

    __slots__ = ("_children", "_edge", "_value")

    def __init__(self, edge: bytes = b"", value: int | None = None) -> None:
        self._edge = edge
        self._value = value
        self._children: dict[bytes, Radix] = {}

    def add(self, ids: bytes, value: int) -> None:
        """Add a string; one that is there has the new number."""
        node, at = self, 0
        while at < len(ids):
            child = node._children.get(ids[at : at + 4])
            if child is None:
                node._children[ids[at : at + 4]] = Radix(ids[at:], value)
                return
            same = 4 * common_head(ids_of(child._edge), ids_of(ids[at : at + len(child._edge)]))
            if same < len(child._edge):
                child._split(same)
            node, at = child, at + same
        node._value = value

    def remove(self, ids: bytes) -> None:
        """Remove a string that is there."""
        trail, at = [self], 0
        while at < len(ids):
            trail.append(trail[-1]._children[ids[at : at + 4]])
            at += len(trail[-1]._edge)
        trail[-1]._value = None
        for parent, node in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
            if node._value is not None or len(node._children) > 1:
                return
            if node._children:  # one string goes on: its edge joins
                (only,) = node._children.values()
                node._edge += only._edge
                node._value, node._children = only._value, only._children
                return
            del parent._children[node._edge[:4]]

    def strings_along(self, raw: bytes, start: int, stop: int) -> Along:
        """The strings along tokens ``start`` to ``stop`` of ``raw``."""
        node, at, end = self, 4 * start, 4 * stop
        values: list[int] = []
        while at < end:
            child = node._children.get(raw[at : at + 4])
            if child is None:
                break
            if len(child._edge) <= end - at and raw.startswith(child._edge, at):
                node, at = child, at + len(child._edge)
                if node._value is not None:
                    values.append(node._value)
                continue
            rest = raw[at : min(end, at + len(child._edge))]
            common = common_head(ids_of(child._edge[: len(rest)]), ids_of(rest))
            return Along(tuple(values), at // 4 - start + common, child._any_number())
        return Along(tuple(values), at // 4 - start, node._any_number())

    def _split(self, at: int) -> None:
        rest = Radix(self._edge[at:], self._value)
        rest._children = self._children
        self._edge, self._value, self._children = self._edge[:at], None, {rest._edge[:4]: rest}

    def _any_number(self) -> int | None:
        """The number of a string that goes through here."""
        node = self
        while node._value is None and node._children:
            node = next(iter(node._children.values()))
        return node._value


def common_head(a: Ids, b: Ids) -> int:
    """Number of equal first ids."""
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


def ids_of(raw: bytes) -> Ids:
    """Token ids of their bytes."""
    return np.frombuffer(raw, "<u4")
