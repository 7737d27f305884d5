"""Encodings of chunks: read where the store has them, made and kept where not, whatever the system prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from kamera.content import Chunk, Encoded
from kamera.engines import Engine
from kamera.errors import CorruptChunk, UnknownChunk, WrongKey
from kamera.patches.chunks import Facts
from kamera.patches.losses import Losses
from kamera.store import CanonicalRecord, ChunkStore, EncodingRecord, encoding_context

logger = logging.getLogger(__name__)


class Encodings:
    """What the vision part of one backbone made of chunks. ``vision`` is the fingerprint of that part.

    What the store cannot take or give goes to ``losses``.
    """

    def __init__(self, backbone: Engine, store: ChunkStore, losses: Losses) -> None:
        self.vision = backbone.vision_fingerprint
        self._backbone = backbone
        self._store = store
        self._losses = losses

    def stored(self, chunk: Chunk) -> Facts | None:
        """A chunk at hand, if its encoding is stored; a damaged one is a miss. None for text."""
        held = self._read(chunk.id) if chunk.has_media else None
        if held is None:
            return None
        return Facts(chunk.id, Encoded(chunk.input_ids, chunk.position_inputs(), held), chunk.label)

    def made(self, chunk: Chunk) -> Facts:
        """A chunk encoded now, and its encoding kept. Raises what `Engine.encode` raises."""
        facts = Facts(chunk.id, self._backbone.encode(chunk), chunk.label)
        with self._losses.borne(f"the encoding of chunk {chunk.id[:12]} was not kept"):
            self.keep(facts)
        return facts

    def keep(self, facts: Facts) -> None:
        """Have a chunk's encoding in the store; text has none. Raises what the store raises."""
        if facts.encoded.tensors:
            context = encoding_context(self.vision, self._store.tenant)
            self._store.put(EncodingRecord(facts.chunk_id, context, facts.length, facts.encoded.tensors))

    def behind(self, record: CanonicalRecord) -> Facts:
        """The chunk of a stored canonical. Raises UnknownChunk when its encoding is gone, CorruptChunk."""
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

    def _read(self, chunk_id: str) -> Mapping[str, torch.Tensor] | None:
        with self._losses.borne(f"the encoding of chunk {chunk_id[:12]} was not looked up"):
            try:
                found = self._store.get_encoding(self.vision, chunk_id)
                return None if found is None else dict(found.embeds)
            except (CorruptChunk, WrongKey) as error:
                # the chunk is at hand, so it is encoded and kept again
                logger.warning("a stored encoding was refused: %s", error)
                self._losses.note(f"encoding refused: {error}")
        return None
