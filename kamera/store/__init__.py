"""Position-free, content-addressed storage of canonicals and patches.

``docs/store-format.md`` specifies the files. Tensors of a record that a store returned may be
shared and must not be written in place.
"""

from kamera.ops.digest import chunk_id, digest, tensor_digest
from kamera.store.admin.admin import StoreAdmin
from kamera.store.admin.bundle import Exported, Imported, certificate_folders
from kamera.store.admin.forget import Forgotten
from kamera.store.info import MemoryStats, ObjectInfo, StoreStats, VerifyReport
from kamera.store.keys import Context, canonical_key, patch_key
from kamera.store.records import CanonicalRecord, PatchRecord
from kamera.store.seal.rotate import Rotated
from kamera.store.search.lookback import Hit, NearDuplicate
from kamera.store.store import ChunkStore

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
    "StoreAdmin",
    "StoreStats",
    "VerifyReport",
    "canonical_key",
    "certificate_folders",
    "chunk_id",
    "digest",
    "patch_key",
    "tensor_digest",
]
