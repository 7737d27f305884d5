"""What is stored of the chunks of one context, read or else made: encodings, canonicals, patches."""

from __future__ import annotations

import copy as copies
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import Engine, Span
from kamera.errors import IncompatibleChunk, UnknownChunk, quote
from kamera.ops import Patch, PatchBudget
from kamera.patches.anchor import Anchor, StoredIdentity
from kamera.patches.background import Background, Owed, Priority, background_of, put_owed, waiting_records
from kamera.patches.catalogue import Catalogue
from kamera.patches.chunks import prefill_behind, prefix_kv
from kamera.patches.losses import LOOK_UP_ERRORS, Losses, Strict
from kamera.store import (
    CanonicalRecord,
    ChunkStore,
    Context,
    EncodingRecord,
    Outline,
    PatchRecord,
    canonical_key,
    patch_key,
    picture_embedding,
    to_store_form,
    why_missed,
)


class Encodings:
    """Encodings of chunks by the vision part of one backbone, as ``identity`` says who it is.

    Store errors go to ``losses``.
    """

    def __init__(self, backbone: Engine, store: ChunkStore, losses: Losses, identity: StoredIdentity) -> None:
        self.context = identity.encoding_context(store.tenant)
        self.here: set[str] = set()  # ids of the chunks that were encoded here, from their pixels
        self._backbone = backbone
        self._store = store
        self._losses = losses
        self._waiting = waiting_records(store).chunks

    def find(self, chunk: Chunk) -> Encoded | None:
        """The encoding of a given chunk whose encoding is stored, or waits to be; a damaged one is a miss.

        None for text.
        """
        if not chunk.has_media:
            return None
        waiting, held = self._waiting.get((self.context, chunk.id)), None
        try:
            held = None if waiting else self._store.get_encoding(self.context.fingerprint, chunk.id)
        except LOOK_UP_ERRORS as error:
            self._losses.miss("encoding", f"the encoding of chunk {chunk.id[:12]}", error)
        if held is None:
            return waiting
        return Encoded(chunk.input_ids, chunk.position_inputs(), dict(held.embeds), chunk.id, chunk.label)

    def make(self, chunk: Chunk, *, later: bool = False) -> Encoded:
        """Encode a chunk and store its encoding, as background work if ``later``; a store's error is a loss.

        Raises the errors of `Engine.encode`.
        """
        encoded = self._backbone.encode(chunk)
        self.here.add(chunk.id)
        if not encoded.tensors:
            return encoded
        what = f"the encoding of chunk {chunk.id[:12]} was not kept"

        def owed() -> list[Owed]:
            return [Owed(self._store, self.records(encoded), self._losses, what)]

        def drop(why: str) -> None:
            self._waiting.pop(name, None)
            self._losses.note_for_next(f"{what}: {why}")

        if later:  # not even the record is made before the first token
            queue, name = background_of(self._backbone), (self.context, chunk.id)
            self._waiting[name] = encoded
            self._store.awaited[id(queue)] = queue.flush
            queue.add(owed, Priority.CHUNK, encoded.tensors.values(), drop, reads=())
        else:
            put_owed(owed())
        return encoded

    def records(self, encoded: Encoded) -> list[EncodingRecord]:
        """A chunk's encoding; text has none."""
        if not encoded.tensors:
            return []
        return [EncodingRecord(encoded.chunk_id, self.context, encoded.num_tokens, encoded.tensors)]

    def behind(self, record: CanonicalRecord) -> Encoded:
        """The encoding of the chunk of a stored canonical.

        Raises UnknownChunk if its encoding is gone, CorruptChunk if it is damaged.
        """
        chunk_id, tensors = record.chunk_id, dict[str, torch.Tensor]()
        if record.vision:
            found = self._store.get_encoding(record.vision, chunk_id)
            if found is None:
                raise UnknownChunk(
                    f"the encoding of chunk {chunk_id[:12]} has left {self._store!r}: append its content "
                    "again"
                )
            tensors = dict(found.embeds)
        label = str(record.info.get("label", ""))
        return Encoded(record.input_ids, dict(record.inputs), tensors, chunk_id, label)


class Former:
    """Canonicals and patches of one context: read from the store if there, else formed and stored.

    A window and its forks share one; a job has one per prompt. Patches are formed within ``budget``, or
    larger, up to full rank, to leave out at most ``max_error``; with a ``queue`` they are factored and stored
    in the background there, and whoever looks for one of a chunk waits for those in progress. Store errors
    are raised unless ``losses`` tolerate them.
    """

    def __init__(
        self,
        backbone: Engine,
        store: ChunkStore,
        anchor: Anchor,
        budget: PatchBudget,
        queue: Background | None = None,
        losses: Losses | None = None,
        max_error: float | None = None,
    ) -> None:
        budget.check(len(backbone.layout))
        self.backbone = backbone
        self.store = store
        self.anchor = anchor
        self.budget = budget
        self.queue = queue
        self.losses = losses or Strict()
        self.max_error = max_error
        self.encodings = Encodings(backbone, store, self.losses, anchor.identity)
        self.context = anchor.identity.context(anchor.digest, store.tenant, store.kv)
        self.catalogue = Catalogue(store, self.context, queue, self.losses)
        self.anchor_span = Span(anchor.kv, None, (0,) * backbone.axes)
        self.waiting = waiting_records(store).chunks
        self._here = threading.local()
        anchor.identity.check(backbone)

    def with_budget(self, budget: PatchBudget) -> Former:
        """The same former with another patch budget."""
        budget.check(len(self.backbone.layout))
        other = copies.copy(self)
        other.budget = budget
        return other

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Context in which this thread reads each row once, and the canonical it works on once."""
        outer = getattr(self._here, "latest", None)
        self._here.latest = outer or {}
        try:
            with self.catalogue.operation():
                yield
        finally:
            self._here.latest = outer

    # -- chunks --------------------------------------------------------------------------------

    def encoded_of(self, chunk_id: str) -> Encoded:
        """The encoding of an archived chunk. Raises UnknownChunk, IncompatibleChunk or CorruptChunk."""
        if waiting := self.waiting.get((self.context, chunk_id)):
            return waiting
        record = self.store.get_canonical(self.context, chunk_id)
        others = self.store.contexts_of(chunk_id) if record is None else []
        for other in others:
            # in another form or behind another prompt its KV is of no use here, but its encoding is
            if record is None and other.fingerprint == self.context.fingerprint:
                record = self.store.get_canonical(other, chunk_id)
        if record is not None:
            if record.context == self.context:
                self._remember(chunk_id, self._copy_of(record))
                self.catalogue.mark_read(chunk_id)
            return self.encodings.behind(record)
        if others:
            raise IncompatibleChunk(
                f"chunk {chunk_id[:12]} was archived by backbone {others[0].fingerprint[:12]}, this is "
                f"{self.context.fingerprint[:12]} ({why_missed(self.context, others[0])}): append its "
                "content with this backbone"
            )
        raise UnknownChunk(
            f"no chunk {quote(chunk_id)} in {self.store!r} for this backbone and system prompt: append its "
            "content first"
        )

    def find(self, chunk: Chunk) -> Encoded | None:
        """The encoding of a given chunk, if it needs no vision encode; a damaged object is a miss.

        Its canonical is read if it is archived, since it is about to be served.
        """
        if waiting := self.waiting.get((self.context, chunk.id)):
            return waiting
        record = self._record(chunk.id)
        if record is not None:
            self._remember(chunk.id, self._copy_of(record))
        if record is not None and not chunk.has_media:
            return self.encodings.behind(record)
        return self.encodings.find(chunk)

    def canonical_positions(self, encoded: Encoded) -> torch.Tensor:
        """The model's positions of a chunk right behind the anchor, ``[axes, tokens]``."""
        positions = self.backbone.positions(
            [self.anchor.input_ids, encoded.input_ids], [{}, encoded.position_inputs]
        )
        return positions[:, self.anchor.length :]

    # -- canonicals ----------------------------------------------------------------------------

    def canonical(self, encoded: Encoded, *, leading: bool = False) -> Span:
        """The chunk's KV behind the anchor alone, in the form the store keeps; prefilled if not stored yet.

        Patches are formed against this form and applied to it, so that they match: in a store of codes they
        also make up for the loss of the coding. ``leading``: it is served right behind the anchor, so one
        prefilled just now comes as the model computed it, exact in any store.
        """
        span, owed = self.canonical_and_owed(encoded, leading=leading)
        put_owed(owed)
        return span if leading else self._remember(encoded.chunk_id, span)

    def canonical_and_owed(self, encoded: Encoded, *, leading: bool = False) -> tuple[Span, list[Owed]]:
        """The chunk's KV in the form the store keeps, and what the store does not have of it yet."""
        held = self.find_canonical(encoded)
        if held is not None:
            return held, []
        self.catalogue.note_miss(encoded.chunk_id)
        span = self._prefill(encoded)
        record, owed = self.records_to_put(encoded, span)
        return span if record.loss is None or leading else self._copy_of(record), [owed]

    def find_canonical(self, encoded: Encoded) -> Span | None:
        """`canonical`, if it is at hand or stored; None without a forward."""
        held = self._find_held(encoded.chunk_id)
        if held is None and (record := self._record(encoded.chunk_id)) is not None:
            held = self._remember(encoded.chunk_id, self._copy_of(record))
        return held

    def base_copy(self, encoded: Encoded, base: str) -> Span | None:
        """The chunk's KV behind the anchor ``base``, as a row promised; None if the row was wrong."""
        held = self._find_held(encoded.chunk_id + base)
        if held is not None:
            return held
        record = self._canonical_of(replace(self.context, anchor=base), encoded.chunk_id)
        if record is None:
            self.catalogue.mark_base_missing(encoded.chunk_id)
            return None
        return self._remember(encoded.chunk_id + base, self._copy_of(record))

    def records_to_put(self, encoded: Encoded, span: Span) -> tuple[CanonicalRecord, Owed]:
        """A canonical in the form the store keeps, and that to be put, with the chunk's encoding."""
        record = to_store_form(canonical_of(self, encoded, span))
        self.catalogue.forget(record.key)
        records: list[CanonicalRecord | EncodingRecord | PatchRecord]
        records = [*self.encodings.records(encoded), record]
        return record, Owed(self.store, records, self.losses, f"chunk {encoded.chunk_id[:12]} was not kept")

    # -- patches -------------------------------------------------------------------------------

    def patch(
        self,
        encoded: Encoded,
        antecedents: Sequence[str],
        kind: str,
        formed: str | None,
        base: str = "",
    ) -> Patch | None:
        """The patch that a row promised; None if the row was wrong, which is then refused.

        ``formed`` is the guarantee that the row states, ``base`` as in `PatchRecord`. It comes
        within the budget's rank, or whole where an error bounds it.
        """
        chunk_id = encoded.chunk_id
        if self.queue is not None:
            self.queue.flush_named((self.context, chunk_id))
        record = None
        try:
            record = self.store.get_patch(self.context, chunk_id, antecedents, kind, base)
        except LOOK_UP_ERRORS as error:
            self.losses.miss("patch", f"a patch of chunk {chunk_id[:12]}", error)
        if record is None or record.formed != formed or not self._meets(record, encoded.num_tokens):
            self.catalogue.mark_wrong(patch_key(self.context, chunk_id, antecedents, kind, base))
            return None
        return record.patch.truncate(self.budget.rank) if self.max_error is None else record.patch

    # -- inside --------------------------------------------------------------------------------

    def _find_held(self, chunk_id: str) -> Span | None:
        """The canonical that this operation last worked on."""
        latest: Mapping[str, Span] = getattr(self._here, "latest", None) or {}
        return latest.get(chunk_id)

    def _remember(self, chunk_id: str, span: Span) -> Span:
        """Keep a canonical for the rest of the operation: only the latest, since they are large."""
        if getattr(self._here, "latest", None) is not None:
            self._here.latest = {chunk_id: span}
        return span

    def _record(self, chunk_id: str) -> CanonicalRecord | None:
        """A chunk's canonical from the store, or None."""
        if self.catalogue.canonical(chunk_id) is None:
            return None
        record = self._canonical_of(self.context, chunk_id)  # if refused it is prefilled again
        if record is None:
            self.catalogue.mark_wrong(canonical_key(self.context, chunk_id))
            return None
        self.losses.unkept.discard(chunk_id)
        return record

    def _canonical_of(self, context: Context, chunk_id: str) -> CanonicalRecord | None:
        try:
            return self.store.get_canonical(context, chunk_id)
        except LOOK_UP_ERRORS as error:
            self.losses.miss("canonical", f"chunk {chunk_id[:12]}", error)
            return None

    def _meets(self, record: PatchRecord, length: int) -> bool:
        try:
            return self.budget.is_met_by(PatchBudget.from_info(record.info, record.patch.rank), length)
        except (TypeError, ValueError):
            return False

    def _prefill(self, encoded: Encoded) -> Span:
        """The chunk prefilled behind the anchor alone."""
        positions = self.canonical_positions(encoded)
        head = None
        for chunk_id, tokens in () if self.context.lossy else encoded.heads:
            record = self._record(chunk_id)
            if record is not None:  # the first counts
                ids, there = encoded.input_ids, self.backbone.place(record.kv)
                head = prefix_kv(ids, positions, record.input_ids, record.positions, there, tokens)
                break
        kv = prefill_behind(self.backbone, encoded, positions, self.anchor_span, head)
        return Span.computed(kv, positions)

    def _copy_of(self, record: CanonicalRecord) -> Span:
        return Span.computed(self.backbone.place(record.kv), record.positions, lossy=record.loss is not None)


def canonical_of(former: Former, encoded: Encoded, span: Span) -> CanonicalRecord:
    """The record of a canonical, as the model computed it."""
    extents = former.backbone.extents.of_all([encoded])
    advances = () if extents is None else extents[0].advance.expand(former.backbone.axes, 1)[:, 0].tolist()
    return CanonicalRecord(
        chunk_id=encoded.chunk_id,
        context=former.context,
        input_ids=encoded.input_ids,
        positions=span.positions,
        kv=copies.copy(span.kv),  # what stands in a live cache is copied once
        inputs=encoded.position_inputs,
        info={"label": encoded.label},
        vision=former.encodings.context.fingerprint if encoded.tensors else "",
        behind=former.anchor.length,
        embedding=picture_embedding(
            encoded.input_ids, encoded.tensors, former.backbone.builder.vision_tokens
        ),
        outline=Outline.of(encoded.input_ids, span.positions, advances),
    )
