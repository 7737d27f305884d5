"""Position-free, content-addressed storage of canonicals and patches.

``docs/stores.md`` specifies the files. Tensors of a record that a store returned may be
shared and must not be written in place.
"""

from kamera.files import Folder, NotAFile
from kamera.store.admin import Copied, Forgotten, StoreAdmin, VerifyReport
from kamera.store.keys import (
    Context,
    behind_survivors,
    canonical_key,
    chunks_of,
    computed_base,
    encoding_context,
    is_key,
    object_key,
    patch_key,
    survivor_id,
    whole_id,
    why_missed,
)
from kamera.store.memory import MemoryStats, parse_duration, parse_size
from kamera.store.records import (
    OPENING,
    CanonicalRecord,
    EncodingRecord,
    ObjectInfo,
    Outline,
    PatchRecord,
    conditioned_record,
    to_store_form,
)
from kamera.store.remote import is_remote
from kamera.store.search import Hit, mean_features, picture_embedding
from kamera.store.store import (
    ChunkStore,
    Put,
    StoreStats,
    check_store,
    find_conditioned,
    memory_of,
    signature,
    stored_keys,
)

__all__ = [
    "OPENING",
    "CanonicalRecord",
    "ChunkStore",
    "Context",
    "Copied",
    "EncodingRecord",
    "Folder",
    "Forgotten",
    "Hit",
    "MemoryStats",
    "NotAFile",
    "ObjectInfo",
    "Outline",
    "PatchRecord",
    "Put",
    "StoreAdmin",
    "StoreStats",
    "VerifyReport",
    "behind_survivors",
    "canonical_key",
    "check_store",
    "chunks_of",
    "computed_base",
    "conditioned_record",
    "encoding_context",
    "find_conditioned",
    "is_key",
    "is_remote",
    "mean_features",
    "memory_of",
    "object_key",
    "parse_duration",
    "parse_size",
    "patch_key",
    "picture_embedding",
    "signature",
    "stored_keys",
    "survivor_id",
    "to_store_form",
    "whole_id",
    "why_missed",
]
