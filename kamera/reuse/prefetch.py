"""Stored objects of a plan are read ahead into the store's memory tier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kamera.errors import KameraError
from kamera.store import ChunkStore, Context
from kamera.window import Plan

logger = logging.getLogger(__name__)


class Load(NamedTuple):
    """A canonical, or with ``antecedents`` a patch, as `ChunkStore.info` names it."""

    chunk_id: str
    antecedents: tuple[str, ...] | None = None
    kind: str | None = None
    base: str = ""


def loads_of(plan: Plan) -> list[Load]:
    """The objects that a plan places, in order."""
    loads: list[Load] = []
    for chunk_id, offer in plan.loads:
        if offer is None or not offer.base:
            loads.append(Load(chunk_id))
        if offer is not None:
            loads.append(Load(chunk_id, offer.antecedents, offer.kind, offer.base))
    return loads


class Prefetch:
    """Reads objects in a thread of its own, in the order in which they will be placed.

    They are found in the store's memory tier then, as far as its limit allows. An object that cannot be read
    is left to the placement, which counts it as a miss.
    """

    def __init__(self, store: ChunkStore, context: Context, loads: Sequence[Load]) -> None:
        self._store = store
        self._context = context
        self._loads = tuple(loads)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kamera-prefetch", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything is read."""
        self._thread.join()

    def end(self) -> None:
        """Read nothing more; an object that is being read is read to its end."""
        self._ended.set()

    def _read(self) -> None:
        for load in self._loads:
            if self._ended.is_set():
                return
            try:
                if load.antecedents is None:
                    self._store.get_canonical(self._context, load.chunk_id)
                else:
                    kind = load.kind or "exact"
                    self._store.get_patch(self._context, load.chunk_id, load.antecedents, kind, load.base)
            except (KameraError, OSError) as error:
                logger.warning("chunk %s was not read ahead: %s", load.chunk_id[:12], error)
