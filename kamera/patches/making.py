"""Patches and canonicals made: of a prefill, behind a line of chunks, now or as background work.

A patch is the difference of two KVs of a chunk. What is made as background work is known to every
former on its store until it is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.errors import NonFiniteKV, NotRelocatable
from kamera.ops import Deltas, PatchBudget, Sized, deficit, kv_tensors, patch_error, uniform_offset
from kamera.patches.background import Owed, Priority, background_of, put_owed
from kamera.patches.catalogue import possible_names, stored_patch, worth_harvesting
from kamera.patches.chunks import Before, compact_positions, form_of
from kamera.patches.former import Former
from kamera.store import PatchRecord, patch_key

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Line:
    """A row of chunks behind the anchor; rows with a common prefix share its KV."""

    def __init__(self, former: Former) -> None:
        self._former = former
        self._live = former.backbone.live()
        # spans that stay are not written again
        self._spans = [former.anchor_span]
        self._chunks: list[Encoded] = []

    def arrange(self, chunks: Sequence[Encoded]) -> None:
        """Make the line these chunks, in this order."""
        same = 0
        while same < min(len(chunks), len(self._chunks)) and chunks[same] is self._chunks[same]:
            same += 1
        del self._spans[same + 1 :], self._chunks[same:]
        for chunk in chunks[same:]:
            self.append(chunk)

    def append(self, chunk: Encoded) -> Span:
        """Put a chunk at the end; the leading one is its canonical, if that is exact there."""
        span = None if self._chunks else self._former.canonical(chunk)
        if span is None or span.lossy or not torch.equal(span.positions, self._place(chunk)):
            span = self.prefill(chunk)
        self._spans.append(replace(self._former.anchor_span, kv=span.kv))
        self._chunks.append(chunk)
        return span

    @property
    def chunks(self) -> Sequence[Encoded]:
        """The chunks of the line."""
        return tuple(self._chunks)

    @property
    def before(self) -> Before:
        """What stands before a chunk that is prefilled behind the line."""
        names = tuple(chunk.chunk_id for chunk in self._chunks)
        return Before(names, "exact", tuple(self._spans))

    def prefill(self, chunk: Encoded) -> Span:
        """A chunk prefilled behind the line, which stays as it is."""
        backbone, place = self._former.backbone, self._place(chunk)
        self._live.show(self._spans, room=chunk.num_tokens)
        kv = backbone.prefill([chunk], [place], self._live)[0]
        return Span.computed(kv, place)

    def _place(self, chunk: Encoded) -> torch.Tensor:
        former = self._former
        return compact_positions(former.backbone, former.anchor.input_ids, [*self._chunks, chunk])[-1]


def harvest(former: Former, encoded: Encoded, conditioned: Span, before: Before) -> None:
    """Store the patch that takes the canonical to ``conditioned``, unless a better one is there.

    ``before`` is what that was prefilled behind.
    """
    rows = (
        former.catalogue.patch(encoded.chunk_id, names, "exact") for names in possible_names(before.names)
    )
    stored = (stored_patch(row, former.budget, encoded.num_tokens, former.max_error) for row in rows)
    if worth_harvesting(stored, before.names, before.formed):
        keep_patch(former, encoded, conditioned, before)


def keep_patch(
    former: Former,
    encoded: Encoded,
    span: Span,
    before: Before,
    base: str = "",
) -> bool:
    """Form the patch that takes the canonical to ``span``, and store it.

    ``before`` is what that was prefilled behind, ``base`` as in `PatchRecord`. False if the
    base's row was wrong, which is then refused.
    """
    canonical = former.base_copy(encoded, base) if base else former.canonical(encoded)
    if canonical is None:
        return False
    if encoded.chunk_id in former.losses.unkept:
        return True  # its patch would have nothing to be served with
    deltas, form = _to_form(former, encoded, canonical, span, before, base)
    if former.queue is None or former.queue.is_own_thread:
        put_owed(form())
    else:
        held = [*chain(*map(kv_tensors, (span.kv, canonical.kv, deltas))), *before.tensors]
        dropped, name = partial(patch_dropped, former, encoded), (former.context, encoded.chunk_id)
        former.store.awaited[id(former.queue)] = former.queue.flush
        former.queue.add(form, Priority.PATCH, held, dropped, name, reads=())
    former.catalogue.forget(patch_key(former.context, encoded.chunk_id, before.names, "exact", base))
    return True


def patch_to_put(former: Former, encoded: Encoded, span: Span, before: Before, base: str) -> list[Owed]:
    """Form a patch as `keep_patch` does. Return its record, and that of a new canonical, to be put later."""
    canonical, owed = (former.base_copy(encoded, base), []) if base else former.canonical_and_owed(encoded)
    if canonical is None or encoded.chunk_id in former.losses.unkept:
        return owed
    try:
        return [*owed, *_to_form(former, encoded, canonical, span, before, base)[1]()]
    except BaseException:
        put_owed(owed)
        raise


def patch_dropped(former: Former, encoded: Encoded, why: str) -> None:
    """Leave a note that a patch of a chunk was not formed."""
    former.losses.note_for_next(f"a patch of chunk {encoded.chunk_id[:12]} was not formed: {why}")


def _to_form(
    former: Former,
    encoded: Encoded,
    canonical: Span,
    conditioned: Span,
    before: Before,
    base: str,
) -> tuple[Deltas, Callable[[], list[Owed]]]:
    """What takes a canonical to ``conditioned``, and the work that factors it to a patch.

    Arguments as of `keep_patch`. Raises NotRelocatable if its positions are not uniformly offset.
    """
    layout = former.backbone.layout
    offset = uniform_offset(canonical.positions, conditioned.positions)
    if offset is None:
        raise NotRelocatable(
            f"chunk {encoded.chunk_id[:12]} does not move as a whole: its tokens shift against each "
            "other at the new place (a clip cut out of a longer one?); append it anew"
        )
    deltas = deficit(conditioned.kv, canonical.kv, layout, offset)

    def form() -> list[Owed]:
        ((patch, energy), filled), error = form_within(former, deltas, canonical)
        info = {"energy": energy, "error": error, **filled.to_info()}
        made = (former.context, before.names, "exact", patch, before.formed, info, base)
        what = f"a patch of chunk {encoded.chunk_id[:12]} was not kept"
        return [Owed(former.store, [PatchRecord(encoded.chunk_id, *made)], former.losses, what)]

    return deltas, form


def form_within(former: Former, deltas: Deltas, canonical: Span) -> tuple[Sized, float]:
    """The patch of a deficit under the former's budget, and its error (`kamera.ops.patch_error`).

    Under a ``max_error`` rank and bytes double until it leaves out no more, or has full rank.
    """
    budget: PatchBudget = former.budget
    while True:
        sized = budget.form(deltas, former.backbone.layout, canonical.kv)
        error = patch_error(deltas, sized.formed.patch)
        is_whole = budget.rank >= canonical.positions.shape[1] and budget.share in (None, 1.0)
        if former.max_error is None or error <= former.max_error or is_whole:
            return sized, error
        budget = budget.double(canonical.kv)


MOST_TOKENS = 4096
"""Most tokens of one forward: larger batches save no time and take memory."""


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


def _form(former: Former, chunks: Iterable[Encoded]) -> list[Owed]:
    """Form the canonicals of chunks that have none yet, those of one form in one forward; they are to be put.

    If a chunk fails, the others are put here, and the first error is raised. Raises as `Former.canonical`.
    """
    owed: list[Owed] = []
    failed: list[Exception] = []
    with former.operation():
        missing = {f.chunk_id: f for f in chunks if former.catalogue.canonical(f.chunk_id) is None}
        for group in by_form((form_of(former.backbone, f), f.num_tokens, f) for f in missing.values()):
            made = _form_at_once(former, group) if len(group) > 1 else None
            owed += made or ()
            for encoded in group if made is None else ():
                try:
                    owed += former.canonical_and_owed(encoded)[1]
                except Exception as error:  # the others are archived all the same
                    failed.append(error)
        if failed:
            put_owed(owed)
            raise failed[0]
    return owed


def _form_at_once(former: Former, group: Sequence[Encoded]) -> list[Owed] | None:
    """The canonicals of a group after one forward; None if they have to run alone."""
    try:
        places = [former.canonical_positions(encoded) for encoded in group]
        live = former.backbone.live()
        live.show([former.anchor_span])
        kvs = former.backbone.prefill([f for f in group], places, live, apart=True)
    except (NonFiniteKV, NotRelocatable, torch.OutOfMemoryError) as error:
        logger.info("%d chunks are prefilled one by one: %s", len(group), error)
        return None
    copies = [Span.computed(kv, there) for kv, there in zip(kvs, places, strict=True)]
    return [former.records_to_put(encoded, span)[1] for encoded, span in zip(group, copies, strict=True)]


def archive_later(
    former: Former, leaving: Iterable[tuple[Encoded, Span | None]], needed: Sequence[Encoded] = ()
) -> None:
    """Store the canonicals of chunks as background work: one that is at hand, the others prefilled together.

    The store waits for it when it is closed. If it is dropped, the next report names the chunks of
    ``leaving``, which are offered again when they leave again. ``needed`` are chunks whose canonicals other
    background work reads, and forms if this is dropped.
    """
    queue, alone = background_of(former.backbone), list[Encoded]()
    former.store.awaited[id(queue)] = queue.flush
    for encoded, canonical in leaving:
        former.waiting[former.context, encoded.chunk_id] = encoded
        if canonical is not None:
            _add(
                former,
                partial(_own, former, encoded, canonical),
                [encoded],
                [encoded],
                kv_tensors(canonical.kv),
            )
        else:
            alone.append(encoded)
    if alone or needed:
        both = [*alone, *needed]
        _add(former, partial(_form, former, both), alone, both)


def follow_later(former: Former, encoded: Encoded, predecessor: Encoded) -> None:
    """Form and store, in the background, the patch of a chunk behind its ``predecessor`` alone: one forward.

    Both canonicals are read. If the store did not keep one of them, nothing runs.
    """
    key = (encoded.chunk_id, (predecessor.chunk_id,))
    former.catalogue.followed.add(key)

    def form() -> list[Owed]:
        with former.operation():
            if None in (former.find_canonical(encoded), former.find_canonical(predecessor)):
                former.catalogue.followed.discard(key)
                return []
            line = Line(former)
            line.append(predecessor)
            return patch_to_put(former, encoded, line.prefill(encoded), line.before, "")

    def dropped(why: str) -> None:
        former.catalogue.followed.discard(key)
        logger.info(
            "a patch of chunk %s behind its predecessor was not formed: %s", encoded.chunk_id[:12], why
        )

    holds = [tensor for each in (encoded, predecessor) for tensor in each.tensors.values()]
    queue = background_of(former.backbone)
    former.store.awaited[id(queue)] = queue.flush
    queue.add(form, Priority.PATCH, holds, dropped, reads=encoded.reads | predecessor.reads)


def _own(former: Former, encoded: Encoded, span: Span) -> list[Owed]:
    return [former.records_to_put(encoded, span)[1]]


def _add(
    former: Former,
    made: Callable[[], list[Owed]],
    leaving: Sequence[Encoded],
    chunks: Sequence[Encoded],
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
        for encoded in leaving:
            former.waiting.pop((former.context, encoded.chunk_id), None)
            former.losses.unkept.add(encoded.chunk_id)
            former.losses.note_for_next(f"chunk {encoded.chunk_id[:12]} was not archived: {why}")

    holds = [*kv, *(tensor for encoded in chunks for tensor in encoded.tensors.values())]
    reads = frozenset[str]().union(*(encoded.reads for encoded in chunks))
    background_of(former.backbone).add(archive, Priority.CHUNK, holds, dropped, reads=reads)


def await_archives(former: Former) -> None:
    """Wait until all that is to be archived is stored: for searches over all that was archived."""
    if former.waiting:
        background_of(former.backbone).flush()
