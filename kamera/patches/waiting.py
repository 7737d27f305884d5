"""Chunks that are stored as later work: until then every former on their store knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from kamera.errors import NonFiniteKV, NotRelocatable
from kamera.ops import kv_tensors
from kamera.patches.chunks import Copy, Facts, form_of
from kamera.patches.former import Former
from kamera.patches.later import Worth, later_of
from kamera.patches.line import Line
from kamera.patches.making import patch_to_put
from kamera.patches.owed import Owed, put_owed

MOST_TOKENS = 4096
"""Most tokens of one forward: larger batches save no time and take memory."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


def by_form(items: Iterable[tuple[Hashable | None, int, T]]) -> list[list[T]]:
    """Items that share a forward, in the order of their first: of one form, at most `MOST_TOKENS` together.

    Each is given with its form and its tokens. One without a form is alone.
    """
    groups: list[list[T]] = []
    filling: dict[Hashable, list[T]] = {}
    for form, tokens, item in items:
        group = None if form is None else filling.get(form)
        if group is not None and (len(group) + 1) * tokens <= MOST_TOKENS:
            group.append(item)
            continue
        groups.append([item])
        if form is not None:
            filling[form] = groups[-1]
    return groups


def _form(former: Former, chunks: Iterable[Facts]) -> list[Owed]:
    """Form the canonicals of chunks that have none yet, those of one form in one forward; they are to be put.

    If a chunk fails, the others are put here, and the first error is raised. Raises as `Former.canonical`.
    """
    owed: list[Owed] = []
    failed: list[Exception] = []
    with former.operation():
        missing = {f.chunk_id: f for f in chunks if former.catalogue.canonical(f.chunk_id) is None}
        for group in by_form((form_of(former.backbone, f), f.length, f) for f in missing.values()):
            made = _form_at_once(former, group) if len(group) > 1 else None
            owed += made or ()
            for facts in group if made is None else ():
                try:
                    owed += former.canonical_and_owed(facts)[1]
                except Exception as error:  # the others are archived all the same
                    failed.append(error)
        if failed:
            put_owed(owed)
            raise failed[0]
    return owed


def _form_at_once(former: Former, group: Sequence[Facts]) -> list[Owed] | None:
    """The canonicals of a group after one forward; None if they have to run alone."""
    try:
        places = [former.canonical_positions(facts) for facts in group]
        live = former.backbone.live()
        live.show([former.anchor_span])
        kvs = former.backbone.prefill([f.encoded for f in group], places, live, apart=True)
    except (NonFiniteKV, NotRelocatable, torch.OutOfMemoryError) as error:
        logger.info("%d chunks are prefilled one by one: %s", len(group), error)
        return None
    copies = [Copy(kv, there) for kv, there in zip(kvs, places, strict=True)]
    return [former.records_to_put(facts, copy)[1] for facts, copy in zip(group, copies, strict=True)]


def archive_later(
    former: Former, leaving: Iterable[tuple[Facts, Copy | None]], needed: Sequence[Facts] = ()
) -> None:
    """Store the canonicals of chunks as later work: one that is at hand, the others prefilled together.

    The store waits for it when it is closed. If it is dropped, the next report names the chunks of
    ``leaving``, which are offered again when they leave again. ``needed`` are chunks whose canonicals other
    later work reads, and forms if this is dropped.
    """
    queue, alone = later_of(former.backbone), list[Facts]()
    former.store.awaited[id(queue)] = queue.flush
    for facts, canonical in leaving:
        former.waiting[former.context, facts.chunk_id] = facts
        if canonical is not None:
            _add(former, partial(_own, former, facts, canonical), [facts], [facts], kv_tensors(canonical.kv))
        else:
            alone.append(facts)
    if alone or needed:
        both = [*alone, *needed]
        _add(former, partial(_form, former, both), alone, both)


def follow_later(former: Former, facts: Facts, predecessor: Facts) -> None:
    """Form and store, in the background, the patch of a chunk behind its ``predecessor`` alone: one forward.

    Both canonicals are read. If the store did not keep one of them, nothing runs.
    """
    key = (facts.chunk_id, (predecessor.chunk_id,))
    former.catalogue.followed.add(key)

    def form() -> list[Owed]:
        with former.operation():
            if None in (former.find_canonical(facts), former.find_canonical(predecessor)):
                former.catalogue.followed.discard(key)
                return []
            line = Line(former)
            line.append(predecessor)
            return patch_to_put(former, facts, line.prefill(facts), line.before, "")

    def dropped(why: str) -> None:
        former.catalogue.followed.discard(key)
        logger.info("a patch of chunk %s behind its predecessor was not formed: %s", facts.chunk_id[:12], why)

    holds = [tensor for each in (facts, predecessor) for tensor in each.encoded.tensors.values()]
    queue = later_of(former.backbone)
    former.store.awaited[id(queue)] = queue.flush
    queue.add(form, Worth.PATCH, holds, dropped, reads=facts.reads | predecessor.reads)


def _own(former: Former, facts: Facts, copy: Copy) -> list[Owed]:
    return [former.records_to_put(facts, copy)[1]]


def _add(
    former: Former,
    made: Callable[[], list[Owed]],
    leaving: Sequence[Facts],
    chunks: Sequence[Facts],
    kv: Iterable[torch.Tensor] = (),
) -> None:
    """Hand over work on ``chunks``, which makes records of those ``leaving``; it holds ``kv``, too."""

    def archive() -> list[Owed]:
        owed: list[Owed] = []
        try:
            owed = made()
        finally:
            for chunk_id in {f.chunk_id for f in leaving} - {one.records[-1].chunk_id for one in owed}:
                former.waiting.pop((former.context, chunk_id), None)
        return owed

    def dropped(why: str) -> None:
        for facts in leaving:
            former.waiting.pop((former.context, facts.chunk_id), None)
            former.losses.unkept.add(facts.chunk_id)
            former.losses.note_for_next(f"chunk {facts.chunk_id[:12]} was not archived: {why}")

    holds = [*kv, *(tensor for facts in chunks for tensor in facts.encoded.tensors.values())]
    reads = frozenset[str]().union(*(facts.reads for facts in chunks))
    later_of(former.backbone).add(archive, Worth.CHUNK, holds, dropped, reads=reads)


def await_archives(former: Former) -> None:
    """Wait until all that is to be archived is stored: for searches over all that was archived."""
    if former.waiting:
        later_of(former.backbone).flush()
