"""Chunks and encodings that are stored as later work: until then every former on their store knows them."""

from __future__ import annotations

from kamera.content import Chunk
from kamera.ops import kv_tensors
from kamera.patches.chunks import Copy, Facts
from kamera.patches.former import Former
from kamera.patches.later import Worth, later_of
from kamera.patches.owed import Owed


def archive_later(former: Former, facts: Facts, copy: Copy) -> None:
    """Store a chunk's canonical as later work: ``copy``, or if that is none, one prefilled for it.

    The store waits for it when it is closed. If it is dropped, the next report names the chunk, which is
    offered again when it leaves again.
    """
    queue, name = later_of(former.backbone), (former.context, facts.chunk_id)
    former.waiting[name] = facts
    own = copy.canonical and copy.patch is None and not copy.lossy

    def archive() -> list[Owed]:
        try:
            owed = [former.owed(facts, copy)[1]] if own else former.unarchived(facts)
        except BaseException:
            former.waiting.pop(name, None)
            raise
        if not owed:
            former.waiting.pop(name, None)
        return [one.then(lambda: former.waiting.pop(name, None)) for one in owed]

    def dropped(why: str) -> None:
        former.waiting.pop(name, None)
        former.losses.unkept.add(facts.chunk_id)
        former.losses.leave(f"chunk {facts.chunk_id[:12]} was not archived: {why}")

    former.store.awaited[id(queue)] = queue.flush
    holds = [*facts.encoded.tensors.values(), *(kv_tensors(copy.kv) if own else ())]
    queue.add(archive, Worth.CHUNK, holds, dropped, reads=facts.reads)


def encoded(former: Former, chunk: Chunk) -> Facts:
    """Encode a chunk; its encoding is stored as later work. Raises the errors of `Engine.encode`."""
    facts = former.encodings.fresh(chunk)
    if not facts.encoded.tensors:
        return facts
    queue, name = later_of(former.backbone), (former.encodings.context, facts.chunk_id)
    former.waiting[name] = facts

    def keep() -> list[Owed]:
        return [former.encodings.owed(facts).then(lambda: former.waiting.pop(name, None))]

    def dropped(why: str) -> None:
        former.waiting.pop(name, None)
        former.losses.leave(f"the encoding of chunk {chunk.id[:12]} was not kept: {why}")

    former.store.awaited[id(queue)] = queue.flush
    queue.add(keep, Worth.CHUNK, facts.encoded.tensors.values(), dropped, reads=())
    return facts


def settle(former: Former) -> None:
    """Wait until all that is to be archived is stored: for searches over all that was archived."""
    if former.waiting:
        later_of(former.backbone).flush()
