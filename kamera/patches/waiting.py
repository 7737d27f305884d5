"""Chunks and encodings that are stored as later work: until then every former on their store knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from kamera.content import Chunk
from kamera.ops import kv_tensors
from kamera.patches.chunks import Copy, Facts
from kamera.patches.former import Former
from kamera.patches.later import Worth, later_of
from kamera.patches.owed import Owed
from kamera.patches.together import form_canonicals


def archive_later(
    former: Former, leaving: Iterable[tuple[Facts, Copy]], needed: Sequence[Facts] = ()
) -> None:
    """Store the canonicals of chunks as later work: a copy that is one, the others prefilled together.

    The store waits for it when it is closed. If it is dropped, the next report names the chunks of
    ``leaving``, which are offered again when they leave again. ``needed`` are chunks whose canonicals other
    later work reads, and forms if this is dropped.
    """
    queue, alone = later_of(former.backbone), list[Facts]()
    former.store.awaited[id(queue)] = queue.flush
    for facts, copy in leaving:
        former.waiting[former.context, facts.chunk_id] = facts
        if copy.canonical and copy.patch is None and not copy.lossy:
            _add(former, partial(_own, former, facts, copy), [facts], [facts], kv_tensors(copy.kv))
        else:
            alone.append(facts)
    if alone or needed:
        both = [*alone, *needed]
        _add(former, partial(_formed, former, both), alone, both)


def _own(former: Former, facts: Facts, copy: Copy) -> list[Owed]:
    return [former.owed(facts, copy)[1]]


def _formed(former: Former, chunks: Sequence[Facts]) -> list[Owed]:
    with former.operation():
        return form_canonicals(former, chunks)


def _add(
    former: Former,
    made: Callable[[], list[Owed]],
    leaving: Sequence[Facts],
    chunks: Sequence[Facts],
    kv: Iterable[torch.Tensor] = (),
) -> None:
    """Hand over work on ``chunks``, which makes records of those ``leaving``; it holds ``kv``, too."""
    ids = {facts.chunk_id for facts in leaving}

    def done(chunk_id: str) -> None:
        if chunk_id in ids:
            former.waiting.pop((former.context, chunk_id), None)

    def archive() -> list[Owed]:
        try:
            owed = made()
        except BaseException:
            for chunk_id in ids:
                done(chunk_id)
            raise
        paid = [one.records[-1].chunk_id for one in owed]
        for chunk_id in ids - {*paid}:
            done(chunk_id)
        return [one.then(partial(done, name)) for one, name in zip(owed, paid, strict=True)]

    def dropped(why: str) -> None:
        for facts in leaving:
            former.waiting.pop((former.context, facts.chunk_id), None)
            former.losses.unkept.add(facts.chunk_id)
            former.losses.leave(f"chunk {facts.chunk_id[:12]} was not archived: {why}")

    holds = [*kv, *(tensor for facts in chunks for tensor in facts.encoded.tensors.values())]
    reads = frozenset[str]().union(*(facts.reads for facts in chunks))
    later_of(former.backbone).add(archive, Worth.CHUNK, holds, dropped, reads=reads)


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
