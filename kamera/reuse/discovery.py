"""Where what came before is looked for: an index of one's own, or the one of a store."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from kamera import forks
from kamera.engines import Engine
from kamera.reuse.index import ContentIndex, Found
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import DEFAULT_RULE, RULES, CutRule
from kamera.store import ChunkStore

LIMIT = 256 * 2**20
"""Bytes of an index."""

_guard = forks.Lock()
_discoveries: weakref.WeakKeyDictionary[ChunkStore, dict[str, Discovery]] = weakref.WeakKeyDictionary()


class Discovery:
    """Finds prompts' parts in earlier ones, and remembers how each was cut. Threads may share one."""

    def __init__(self, rule: CutRule = RULES[DEFAULT_RULE]) -> None:
        self._lock = forks.Lock("the index of a store's prompts")
        self._index = ContentIndex(rule, limit=LIMIT)

    def find(self, prompt: Prompt, edges: Sequence[int]) -> Found:
        """As `ContentIndex.find`."""
        with self._lock:
            return self._index.find(prompt, edges)

    def add(self, prompt: Prompt, cuts: Sequence[int]) -> None:
        """As `ContentIndex.add`."""
        with self._lock:
            self._index.add(prompt, cuts)


def discovery_of(backbone: Engine, store: ChunkStore) -> Discovery:
    """The one discovery of the conversations on a store: a store has one tenant."""
    with _guard:
        return _discoveries.setdefault(store, {}).setdefault(backbone.fingerprint, Discovery())
