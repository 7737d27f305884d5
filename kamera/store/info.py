"""What a store tells about its objects without their tensors. JSON-able by `dataclasses.asdict`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kamera.ops import FactorSize, PatchBudget
from kamera.store.keys import PATCH_KINDS, Context, canonical_key, encoding_context, object_key


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its name, what it is of, and its size.

    ``antecedents`` is empty, ``rank`` and ``formed`` are None for what is no patch. ``bytes`` is the
    size as stored, ``created`` seconds since 1970 (UTC). ``budget`` is what a patch was formed under (None
    for one whose header says nothing that is one), ``orderings`` how many an orbit patch is the mean of,
    ``sizes`` those of its factors (`Patch.sizes`), from which its bytes at any rank follow.
    ``base`` is what it cannot be used without: of a canonical the vision fingerprint of its encoding ("": it
    has none), of a patch the anchor of the canonical that it is added to ("": its context's own).
    ``behind``: tokens of the anchor that a canonical was computed behind.
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
    budget: PatchBudget | None = None
    orderings: int | None = None
    base: str = ""
    behind: int = 0
    sizes: tuple[FactorSize, ...] = ()


def home_of(info: ObjectInfo) -> str | None:
    """Key of what an object is of no use without: of a patch its canonical, of a canonical its encoding."""
    if info.kind in PATCH_KINDS:
        own = replace(info.context, anchor=info.base or info.context.anchor)
        return canonical_key(own, info.chunk_id)
    if info.kind == "canonical" and info.base:
        return object_key("encoding", encoding_context(info.base, info.context.tenant), info.chunk_id)
    return None


@dataclass(frozen=True)
class KindCount:
    """Objects of one kind, and their bytes as stored."""

    objects: int
    bytes: int


@dataclass(frozen=True)
class Census:
    """What a tenant has: counts by kind and by form of the KV, of how many chunks and contexts.

    A chunk is counted by whatever is of it, an anchor is none; a context is a model's, not a tower's.
    """

    kinds: dict[str, KindCount]
    chunks: int
    contexts: int
    forms: dict[str, KindCount]

    @classmethod
    def of(cls, objects: Sequence[ObjectInfo], kinds: Iterable[str]) -> Census:
        """The census of ``objects``, which are all of these ``kinds``."""
        held = {kind: [info.bytes for info in objects if info.kind == kind] for kind in kinds}
        forms = sorted({info.context.kv for info in objects})
        of = {form: [info.bytes for info in objects if info.context.kv == form] for form in forms}
        return cls(
            kinds={kind: KindCount(len(sizes), sum(sizes)) for kind, sizes in held.items()},
            forms={form: KindCount(len(sizes), sum(sizes)) for form, sizes in of.items()},
            chunks=len({info.chunk_id for info in objects if info.kind != "anchor"}),
            contexts=len({info.context for info in objects if info.kind not in ("anchor", "encoding")}),
        )


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
class RemoteStats:
    """The remote tier since it was opened.

    ``reads`` and ``writes`` say how they go: ``closed`` (they work), ``failing`` (the last one did not),
    ``open`` (the remote is left alone) or ``half-open`` (about to be tried). ``refused``: objects that
    were not what they should be. ``stored``: objects sent. ``calls`` were made, ``failures`` of them in
    vain, ``skipped`` ones not made because it was down. ``pending``: objects that wait to be sent.
    """

    url: str
    reads: str
    writes: str
    hits: int
    misses: int
    refused: int
    stored: int
    calls: int
    failures: int
    skipped: int
    last_error: str
    pending: int = 0


@dataclass(frozen=True)
class StoreStats:
    """This tenant's share of a store's ``directory`` (else of its memory), and the memory tier in front."""

    url: str
    canonicals: int
    patches: int
    encodings: int
    anchors: int
    bytes: int
    memory: MemoryStats
    remote: RemoteStats | None = None
    directory: bool = False

    @property
    def objects(self) -> int:
        """How many there are, of all kinds."""
        return self.canonicals + self.patches + self.encodings + self.anchors


@dataclass(frozen=True)
class Removed:
    """An object that `StoreAdmin.gc` let go: its name, size, value (`admin.gc`), and why."""

    key: str
    kind: str
    bytes: int
    value: float
    reason: str


@dataclass(frozen=True)
class Collected:
    """What `StoreAdmin.gc` found, and what it let go; after a dry run, what it would let go.

    ``leftovers``: files of dead writers that were removed. ``quarantined``: copies in quarantine that
    were removed, which is only done when asked for.
    """

    objects_before: int
    bytes_before: int
    objects_after: int
    bytes_after: int
    removed: tuple[Removed, ...]
    leftovers: int = 0
    quarantined: int = 0


@dataclass(frozen=True)
class FlushReport:
    """What the remote does not have yet, by name. Nothing in either: all that was put is safe there.

    ``unsaved`` waits: in the cache directory, where it survives and is sent when the store is next
    opened, or, without one, in memory only. ``dropped`` found no room in memory and is lost.
    """

    unsaved: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of reading every object once.

    ``ok``: objects whose every byte is as it was written. ``quarantined``: one line per damaged
    object, now out of the store. ``refused``: one line per object that was left in place because
    this version, or who asked, cannot read it. ``orphan_files``: objects the index did not list, and
    lists now. ``orphan_rows``: rows without an object, now gone. ``stale``: files of writers that
    died, now gone. ``embeddings``: one line per context whose search rows were mended. ``wrong_rows``:
    rows that said something else than their object, and say what it says now.
    """

    ok: int
    quarantined: tuple[str, ...]
    refused: tuple[str, ...]
    orphan_files: int = 0
    orphan_rows: int = 0
    stale: int = 0
    embeddings: tuple[str, ...] = ()
    wrong_rows: int = 0


@dataclass(frozen=True)
class Quarantined:
    """A damaged object that was set aside.

    ``file`` is the copy's own name, ``name`` that of the object it was, ``bytes`` its size, ``when``
    it was set aside (seconds since 1970, UTC), ``reason`` what was wrong with it.
    """

    file: str
    name: str
    bytes: int
    when: float
    reason: str
