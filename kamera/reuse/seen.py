"""Texts that a `Reuser` has met, by the tokens they begin with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kamera.content import Chunk
from kamera.window import SHORTEST_HEAD

_MOST = 4096  # texts, at 8 bytes per token
_ALIKE = 64  # texts of one head that are compared, the last ones


class Seen:
    """The last texts, to find those that begin as a new one does. Not thread-safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, Chunk] = OrderedDict()
        self._ids_by_head: dict[tuple[int, ...], dict[str, None]] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Remember the texts among ``chunks``; the oldest of too many go."""
        for chunk in chunks:
            if not chunk.inputs and chunk.num_tokens >= SHORTEST_HEAD:
                self._texts[chunk.id] = chunk
                self._texts.move_to_end(chunk.id)
                alike = self._ids_by_head.setdefault(_head(chunk), {})
                alike.pop(chunk.id, None)
                alike[chunk.id] = None
        while len(self._texts) > _MOST:
            name, chunk = self._texts.popitem(last=False)
            alike = self._ids_by_head[_head(chunk)]
            del alike[name]
            if not alike:
                del self._ids_by_head[_head(chunk)]

    def texts_with_head(self, chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
        """The texts that share a shortest head with one of ``chunks``, the last 64 of each head."""
        heads = dict.fromkeys(_head(chunk) for chunk in chunks if not chunk.inputs)
        alike = (list(self._ids_by_head.get(head, ()))[-_ALIKE:] for head in heads)
        return tuple(self._texts[name] for names in alike for name in names)


def _head(chunk: Chunk) -> tuple[int, ...]:
    return tuple(chunk.input_ids[:SHORTEST_HEAD].tolist())
