"""Encodings of chunks: read from the store if there, else made and stored, for any system prompt."""

from __future__ import annotations

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import Engine
from kamera.errors import UnknownChunk
from kamera.patches.chunks import Facts
from kamera.patches.identity import StoredIdentity
from kamera.patches.later import Worth, later_of
from kamera.patches.losses import Losses
from kamera.patches.owed import Owed, put_owed, waiting_records
from kamera.store import CanonicalRecord, ChunkStore, EncodingRecord


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

    def find(self, chunk: Chunk) -> Facts | None:
        """Facts of a given chunk whose encoding is stored, or waits to be; a damaged one is a miss.

        None for text.
        """
        if not chunk.has_media:
            return None
        waiting, held = self._waiting.get((self.context, chunk.id)), None
        with self._losses.look_up("encoding", f"the encoding of chunk {chunk.id[:12]}"):
            held = None if waiting else self._store.get_encoding(self.context.fingerprint, chunk.id)
        if held is None:
            return waiting
        return Facts(
            chunk.id, Encoded(chunk.input_ids, chunk.position_inputs(), dict(held.embeds)), chunk.label
        )

    def make(self, chunk: Chunk, *, later: bool = False) -> Facts:
        """Encode a chunk and store its encoding, as later work if ``later``; a store's error is a loss.

        Raises the errors of `Engine.encode`.
        """
        facts = Facts(chunk.id, self._backbone.encode(chunk), chunk.label)
        self.here.add(chunk.id)
        if not facts.encoded.tensors:
            return facts
        what = f"the encoding of chunk {chunk.id[:12]} was not kept"

        def owed() -> list[Owed]:
            return [Owed(self._store, self.records(facts), self._losses, what)]

        def drop(why: str) -> None:
            self._waiting.pop(name, None)
            self._losses.note_for_next(f"{what}: {why}")

        if later:  # not even the record is made before the first token
            queue, name = later_of(self._backbone), (self.context, chunk.id)
            self._waiting[name] = facts
            self._store.awaited[id(queue)] = queue.flush
            queue.add(owed, Worth.CHUNK, facts.encoded.tensors.values(), drop, reads=())
        else:
            put_owed(owed())
        return facts

    def records(self, facts: Facts) -> list[EncodingRecord]:
        """A chunk's encoding; text has none."""
        if not facts.encoded.tensors:
            return []
        return [EncodingRecord(facts.chunk_id, self.context, facts.length, facts.encoded.tensors)]

    def behind(self, record: CanonicalRecord) -> Facts:
        """Facts of the chunk of a stored canonical.

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
        encoded = Encoded(record.input_ids, dict(record.inputs), tensors)
        return Facts(chunk_id, encoded, str(record.info.get("label", "")))
