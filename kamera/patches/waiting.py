"""Chunks that are archived as later work: until then every former on their store knows them."""

from __future__ import annotations

from kamera.patches.chunks import Copy, Facts
from kamera.patches.former import Former
from kamera.patches.later import later_of


def archive_later(former: Former, facts: Facts, copy: Copy) -> None:
    """Store a chunk's canonical as later work: ``copy``, or if that is none, one prefilled for it.

    The store waits for it when it is closed.
    """
    queue, name = later_of(former.backbone), (former.context, facts.chunk_id)
    former.waiting[name] = facts
    own = copy.canonical and copy.patch is None and not copy.lossy

    def archive() -> None:
        try:
            if own:
                former.archive(facts, copy)
            else:
                former.canonical(facts)
        finally:
            former.waiting.pop(name, None)

    former.store.awaited[id(queue)] = queue.flush
    queue.add(archive)


def settle(former: Former) -> None:
    """Wait until all that is to be archived is stored: for searches over all that was archived."""
    if former.waiting:
        later_of(former.backbone).flush()
