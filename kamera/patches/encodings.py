"""Encodings of chunks: read from the store if there, else made and stored, for any system prompt."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import Engine
from kamera.errors import UnknownChunk
from kamera.patches.chunks import Facts
from kamera.patches.identity import StoredIdentity
from kamera.patches.losses import Losses
from kamera.patches.owed import Owed, pay
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

    @property
    def vision(self) -> str:
        """The fingerprint of the vision part."""
        return self.context.fingerprint

    def stored(self, chunk: Chunk) -> Facts | None:
        """Facts of a given chunk, if its encoding is stored; a damaged one is a miss. None for text."""
        held = self._read(chunk.id) if chunk.has_media else None
        if held is None:
            return None
        return Facts(chunk.id, Encoded(chunk.input_ids, chunk.position_inputs(), held), chunk.label)

    def made(self, chunk: Chunk) -> Facts:
        """Encode a chunk and store its encoding. Raises the errors of `Engine.encode`."""
        facts = self.fresh(chunk)
        if facts.encoded.tensors:
            pay([self.owed(facts)])
        return facts

    def fresh(self, chunk: Chunk) -> Facts:
        """Encode a chunk. Raises the errors of `Engine.encode`."""
        facts = Facts(chunk.id, self._backbone.encode(chunk), chunk.label)
        self.here.add(chunk.id)
        return facts

    def owed(self, facts: Facts) -> Owed:
        """The encoding of a chunk with media, to be put; a store's error is a loss."""
        what = f"the encoding of chunk {facts.chunk_id[:12]} was not kept"
        return Owed(self._store, self.records(facts), self._losses, what)

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
            found = self._store.get_encoding(record.vision, chunk_id, self.context.probe)
            if found is None:
                raise UnknownChunk(
                    f"the encoding of chunk {chunk_id[:12]} has left {self._store!r}: append its content "
                    "again"
                )
            tensors = dict(found.embeds)
        encoded = Encoded(record.input_ids, dict(record.inputs), tensors)
        return Facts(chunk_id, encoded, str(record.info.get("label", "")))

    def _read(self, chunk_id: str) -> Mapping[str, torch.Tensor] | None:
        with self._losses.look_up("encoding", f"the encoding of chunk {chunk_id[:12]}"):
            found = self._store.get_encoding(self.vision, chunk_id, self.context.probe)
            return None if found is None else dict(found.embeds)
        return None
