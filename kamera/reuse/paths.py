"""A trie of segments: every added prompt is a path from the root, common prefixes are shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kamera.reuse.parts import Part, Text
from kamera.reuse.radix import Radix, common_head, ids_of
from kamera.reuse.table import Content, SegmentTable

ROOT = 0


@dataclass(eq=False)
class Node:
    """A segment after all those above it.

    ``stop``: tokens of the path that ends here. ``run``: where on it the text begins that it ends in.
    ``last_use``: its moment.
    """

    parent: int
    segment: int
    stop: int
    run: int
    last_use: int = 0
    children: int = 0
    texts: Radix = field(default_factory=Radix)


class Paths:
    """A trie whose node n is one segment after all those above it. Nodes count from 1, none twice."""

    def __init__(self, table: SegmentTable) -> None:
        self._table = table
        self._nodes = {ROOT: Node(-1, -1, 0, 0)}
        self._next = ROOT + 1
        self._steps: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, node: int) -> Node:
        return self._nodes[node]

    def get(self, node: int) -> Node | None:
        """The node; None if there is none, or no more."""
        return self._nodes.get(node)

    def content(self, node: int) -> Content:
        """The node's segment."""
        return self._table[self._nodes[node].segment]

    def child(self, node: int, content: Content) -> int | None:
        """The child of ``node`` for a segment; None if there is none."""
        number = self._table.find(content)
        return None if number is None else self._steps.get((node, number))

    def step(self, node: int, content: Content) -> tuple[int, bool]:
        """As `child`, and True if it was created. Raises `KeyError` for an unknown node."""
        parent, child = self._nodes[node], self.child(node, content)
        if child is not None:
            return child, False
        segment, new = self._table.add(content), self._next
        stop = parent.stop + content.tokens
        self._next += 1
        self._nodes[new] = Node(node, segment, stop, stop if content.media else parent.run)
        self._steps[node, segment] = new
        parent.children += 1
        if not content.media:
            parent.texts.add(content.ids, new)
        return new, True

    def remove(self, node: int) -> int | None:
        """Remove a node without children; its content's bytes if no other node has it, else None."""
        content = self.content(node)
        entry = self._nodes.pop(node)
        parent = self._nodes[entry.parent]
        parent.children -= 1
        parent.last_use = max(parent.last_use, entry.last_use)
        del self._steps[entry.parent, entry.segment]
        if not content.media:
            parent.texts.remove(content.ids)
        return len(content.ids) if self._table.release(entry.segment) else None

    def tail(self, node: int, count: int) -> bytes:
        """The ids of at most ``count`` tokens with which the text that ends at ``node`` ends."""
        ids, size = b"", 4 * min(count, self._nodes[node].stop - self._nodes[node].run)
        while len(ids) < size:
            ids = self.content(node).ids + ids
            node = self._nodes[node].parent
        return ids[len(ids) - size :]

    def longest_onward(self, text: Text, node: int, at: int) -> list[Part]:
        """The longest path below ``node`` that the prompt goes on along from token ``at``.

        The last part may be the head of its segment; of paths of one length, the one of most whole segments.
        """
        prompt, best, best_link = text.prompt, (at, 0), None
        ends: list[tuple[int, int, int, _Link]] = [(node, at, 0, None)]
        while ends:
            node, at, whole, link = ends.pop()
            if (at, whole) > best:
                best, best_link = (at, whole), link
            picture = text.picture(start=at)
            if picture is not None:
                _, stop, content = picture
                child = self.child(node, content)
                if child is not None:
                    ends.append((child, stop, whole + stop - at, (link, Part(at, stop, child, 0))))
                continue
            along = self._nodes[node].texts.strings_along(prompt.raw, at, text.text_end(at))
            for child in along.values:
                stop = at + self.content(child).tokens
                ends.append((child, stop, whole + stop - at, (link, Part(at, stop, child, 0))))
            if along.value is not None and (at + along.common, whole) > best:
                best = at + along.common, whole
                best_link = link, Part(at, at + along.common, along.value, 0)
        return [*_unlink(best_link)][::-1]

    def longest_around(self, text: Text, node: int, offset: int, at: int, first: int) -> list[Part]:
        """The longest part of a path through ``node`` that the prompt has around token ``at``.

        What ends before the segment's token ``offset`` ends before ``at``; nothing before ``first`` counts.
        """
        parts = self._backward(text, node, offset, at, first)[::-1]
        ids = self.content(node).ids[4 * offset :]
        count = common_head(ids_of(ids), text.prompt.ids[at : text.text_end(at)])
        if count:
            start, begin = (at, offset) if not parts else (parts[-1].start, parts[-1].offset)
            parts[-1:] = [Part(start, at + count, node, begin)]
        return parts + (self.longest_onward(text, node, at + count) if 4 * count == len(ids) else [])

    def _backward(self, text: Text, node: int, offset: int, at: int, first: int) -> list[Part]:
        """The parts before token ``at`` that equal the path before a node's token ``offset``, last first."""
        parts: list[Part] = []
        while node != ROOT:
            content = self.content(node)
            if content.media:
                picture = text.picture(stop=at)
                if picture is None or picture[2] != content or picture[0] < first:
                    break
                count = content.tokens
            else:
                low = max(first, text.opening(at))
                ids = text.prompt.ids[low:at][::-1]
                count = common_head(ids_of(content.ids[: 4 * offset])[::-1], ids)
            if count:
                parts.append(Part(at - count, at, node, offset - count))
                at -= count
            if count < offset:
                break
            node = self._nodes[node].parent
            offset = 0 if node == ROOT else self.content(node).tokens
        return parts


_Link = tuple["_Link", Part] | None


def _unlink(link: _Link) -> Iterator[Part]:
    while link is not None:
        link, part = link
        yield part
