"""What a store tells about its objects without their tensors. JSON-able by `dataclasses.asdict`."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.store.keys import Context


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its name, what it is of, and its size.

    ``antecedents`` is empty, ``rank`` and ``formed`` are None for a canonical. ``bytes`` is the
    size as stored, ``created`` seconds since 1970 (UTC).
    """

    key: str
    kind: str
    chunk_id: str
    context: Context
    antecedents: tuple[str, ...]
    tokens: int
    rank: int | None
    formed: str | None
    bytes: int
    created: float


@dataclass(frozen=True)
class MemoryStats:
    """The memory tier: what it holds (bytes), and how its look-ups went since it was opened."""

    objects: int
    bytes: int
    limit: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True)
class StoreStats:
    """This tenant's share of a store, and the memory tier in front of it."""

    url: str
    canonicals: int
    patches: int
    bytes: int
    memory: MemoryStats


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of reading every object once.

    ``ok``: objects whose every byte is as it was written. ``quarantined``: one line per damaged
    object, now out of the store. ``refused``: one line per object that was left in place because
    this version cannot read it.
    """

    ok: int
    quarantined: tuple[str, ...]
    refused: tuple[str, ...]
