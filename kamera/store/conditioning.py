"""KV of a chunk as it was run in some window, behind antecedents, stored under the digest of its content.

A canonical is the same for everyone; this is what one window has. Whoever is given its name gets these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kamera.ops import digest, tensor_digest
from kamera.store.keys import Context
from kamera.store.records import CanonicalRecord
from kamera.store.store import ChunkStore


def conditioned_record(record: CanonicalRecord, antecedents: Sequence[str]) -> CanonicalRecord:
    """The record of KV that was run behind ``antecedents``, named by its content; reads all of it."""
    block_digests = [tensor_digest(dict(block)) for block in record.kv.parts]
    places = (tensor_digest(record.input_ids), tensor_digest(record.positions))
    content = digest("kamera.content.v1", *places, *block_digests)
    context, chunk_ids = replace(record.context, kv="as-is"), tuple(antecedents)
    return replace(record, kind="conditioned", context=context, antecedents=chunk_ids, content=content)


def find_conditioned(
    store: ChunkStore, context: Context, chunk_id: str, antecedents: Sequence[str], content: str
) -> CanonicalRecord | None:
    """The KV of a chunk behind ``antecedents`` whose content has this digest; None is a miss."""
    context = replace(context, kv="as-is")
    name = store._object_name(context, chunk_id, antecedents, "conditioned", content)
    return store._get(CanonicalRecord, context, name)
