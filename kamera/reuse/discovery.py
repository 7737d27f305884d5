"""Where what came before is looked for: an index of one's own, that of a store, or a file of processes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from kamera import forks
from kamera.engines import Engine
from kamera.errors import CorruptIndex, ForeignIndex, UnusableIndex
from kamera.reuse.cuts import cut
from kamera.reuse.file import IndexFile
from kamera.reuse.index import ContentIndex, Found
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import DEFAULT_RULE, RULES, CutRule
from kamera.reuse.scope import Scope
from kamera.store import ChunkStore

logger = logging.getLogger(__name__)

LIMIT = 256 * 2**20
"""Bytes of an index in memory."""

_guard = forks.Lock()
_shared: weakref.WeakKeyDictionary[ChunkStore, dict[str, Discovery]] = weakref.WeakKeyDictionary()


class Discovery:
    """Finds prompts' parts in earlier ones, and remembers how each was cut. Threads may share one.

    An index file that is damaged, or that the system refuses, is a miss and is logged: prompts are cut by
    the rule then. Raises ForeignIndex for a file of another model or tenant.
    """

    def __init__(
        self,
        backbone: Engine,
        store: ChunkStore,
        rule: CutRule = RULES[DEFAULT_RULE],
        file: IndexFile | None = None,
    ) -> None:
        self._lock = forks.Lock("the index of a store's prompts")
        if file is None:
            scope = Scope(backbone.fingerprint, "", store.tenant)
            self._index: ContentIndex | IndexFile = ContentIndex(scope, rule, limit=LIMIT)
            self._rule = rule
            return
        self._index, self._rule, scope = file, file.index.rule, file.index.scope
        for what, its, own in (
            ("model", scope.model, backbone.fingerprint),
            ("tenant", scope.tenant, store.tenant),
        ):
            if its != own:
                raise ForeignIndex(f"the index is of {what} {its[:12]!r}, the reuser's is {own[:12]!r}")

    def find(self, prompt: Prompt, edges: Sequence[int]) -> Found:
        """As `ContentIndex.find`."""
        try:
            with self._lock:
                return self._index.find(prompt, edges)
        except (CorruptIndex, UnusableIndex) as error:
            logger.warning("nothing was looked up: %s", error)
            return Found(0, (), tuple(cut(prompt, self._rule, edges=edges)))

    def add(self, prompt: Prompt, cuts: Sequence[int]) -> None:
        """As `ContentIndex.add`."""
        try:
            with self._lock:
                self._index.add(prompt, cuts)
        except (CorruptIndex, UnusableIndex) as error:
            logger.warning("a prompt was not added to the index: %s", error)


def discovery_of(backbone: Engine, store: ChunkStore) -> Discovery:
    """The one discovery of the conversations on a store, in memory: a store has one tenant."""
    with _guard:
        return _shared.setdefault(store, {}).setdefault(backbone.fingerprint, Discovery(backbone, store))
