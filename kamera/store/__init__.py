"""Position-free, content-addressed storage of canonicals and patches.

``docs/store-format.md`` specifies the files. Tensors of a record that a store returned may be
shared and must not be written in place.
"""

from kamera.ops.digest import chunk_id, digest, tensor_digest
from kamera.store.info import MemoryStats, ObjectInfo, StoreStats, VerifyReport
from kamera.store.keys import Context, canonical_key, patch_key
from kamera.store.records import CanonicalRecord, PatchRecord
from kamera.store.seal.rotate import Rotated
from kamera.store.search.lookback import Hit, NearDuplicate
from kamera.store.store import ChunkStore
from kamera.store.upkeep.bundle import Exported, Imported
from kamera.store.upkeep.forget import Forgotten

__all__ = [
    "CanonicalRecord",
    "ChunkStore",
    "Context",
    "Exported",
    "Forgotten",
    "Hit",
    "Imported",
    "MemoryStats",
    "NearDuplicate",
    "ObjectInfo",
    "PatchRecord",
    "Rotated",
    "StoreStats",
    "VerifyReport",
    "canonical_key",
    "chunk_id",
    "digest",
    "patch_key",
    "tensor_digest",
]
