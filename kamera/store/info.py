"""Descriptions and reports of a store's objects, without tensors. JSON-able by `dataclasses.asdict`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from kamera.ops import PatchBudget
from kamera.store.keys import PATCH_KINDS, Context
from kamera.store.outline import Outline

Progress = Callable[[int, int], None]
"""Called with the number of objects done, and their total."""

_COPY = re.compile(r"([0-9a-f]{64})\.(\d{1,20})(\.safetensors)?")

BY_AGE = attrgetter("created", "key")
"""What objects are sorted by: oldest first, those of one moment by their keys."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its key, its chunk and context, and its size.

    ``antecedents`` is empty, ``rank`` and ``formed`` are None for an object that is no patch. ``bytes`` is
    the size as stored, ``created`` seconds since 1970 (UTC). ``budget`` is the one a patch was formed under
    (None if its header holds no valid one), ``orderings`` the number of orderings averaged in an orbit patch,
    ``error`` the share of the deficit's energy that a patch leaves out, in its worst layer and channel (None:
    not said).
    ``base`` identifies the object that this one cannot be used without: for a canonical the vision
    fingerprint of its encoding ("": it has none), for a patch the anchor of the canonical to which it is
    added ("": its context's own). ``behind``: tokens of the anchor that a canonical was computed behind.
    ``outline`` describes the chunk of a canonical, an anchor or conditioned KV.
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
    error: float | None = None
    outline: Outline | None = None


class Selection(NamedTuple):
    """Objects of a kind, a chunk and a context (None: any); at most ``limit``, after the first ``offset``."""

    kind: str | None = None
    chunk_id: str | None = None
    context: Context | None = None
    limit: int | None = None
    offset: int = 0

    def select(self, objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
        """Those of ``objects``, in their order."""
        infos = [info for info in objects if self.selects(info)]
        return infos[self.offset :][: self.limit]

    def selects(self, info: ObjectInfo) -> bool:
        """True if an object is of this kind, chunk and context."""
        kind, chunk_id, context = self[:3]
        return (
            kind in (None, info.kind)
            and chunk_id in (None, info.chunk_id)
            and context in (None, info.context)
        )


ALL = Selection()


class Weighed(NamedTuple):
    """The data of an object for `gc`: ``uses`` decayed to the time ``used`` (0 and None: never used)."""

    key: str
    kind: str
    chunk_id: str
    fingerprint: str
    anchor: str
    tenant: str
    kv: str
    base: str
    tokens: int
    bytes: int
    created: float
    stamp: str = ""
    uses: float = 0.0
    used: float | None = None

    @classmethod
    def of(cls, info: ObjectInfo) -> Weighed:
        """The data of an object whose uses are not counted."""
        own = info.context
        ids = (info.chunk_id, own.fingerprint, own.anchor, own.tenant, own.kv, info.base)
        return cls(info.key, info.kind, *ids, info.tokens, info.bytes, info.created)

    @property
    def group(self) -> tuple[str, ...]:
        """Equal for a canonical and its patches; unique for an encoding or an anchor."""
        if self.kind == "encoding":
            return self.chunk_id, self.fingerprint, self.tenant
        anchor = (self.base if self.kind in PATCH_KINDS else "") or self.anchor
        return self.chunk_id, self.fingerprint, anchor, self.tenant, self.kv

    @property
    def encoding(self) -> tuple[str, ...]:
        """The `group` of the encoding that a canonical refers to; for any other object, of no object."""
        return (self.chunk_id, self.base, self.tenant) if self.kind == "canonical" and self.base else ()


@dataclass(frozen=True)
class KindCount:
    """Objects of one kind, and their bytes as stored."""

    objects: int
    bytes: int


@dataclass(frozen=True)
class Census:
    """A tenant's objects, counted by kind and by form of the KV; the numbers of their chunks and contexts.

    A chunk counts if any object of it is there; an anchor is no chunk. Contexts are those of models, not
    of vision towers.
    """

    kinds: dict[str, KindCount]
    chunks: int
    contexts: int
    forms: dict[str, KindCount]

    @classmethod
    def of(cls, objects: Sequence[Weighed], kinds: Iterable[str]) -> Census:
        """The census of ``objects``, whose kinds are all in ``kinds``."""
        kind_sizes = {kind: [one.bytes for one in objects if one.kind == kind] for kind in kinds}
        forms = sorted({one.kv for one in objects})
        form_sizes = {form: [one.bytes for one in objects if one.kv == form] for form in forms}
        models = (one for one in objects if one.kind not in ("anchor", "encoding"))
        return cls(
            kinds={kind: KindCount(len(sizes), sum(sizes)) for kind, sizes in kind_sizes.items()},
            forms={form: KindCount(len(sizes), sum(sizes)) for form, sizes in form_sizes.items()},
            chunks=len({one.chunk_id for one in objects if one.kind != "anchor"}),
            contexts=len({(one.fingerprint, one.anchor, one.kv) for one in models}),
        )


@dataclass(frozen=True)
class MemoryStats:
    """The memory tier: its content (sizes in bytes), and its look-ups by outcome since it was opened."""

    objects: int
    bytes: int
    limit: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True)
class RemoteStats:
    """The remote tier since it was opened.

    ``reads`` and ``writes`` are the states of its circuit breakers: ``closed`` (calls work), ``failing``
    (the last call failed), ``open`` (no call is made) or ``half-open`` (the next call is a trial).
    ``refused``: objects found but rejected (damaged, foreign, or of another key or format). ``stored``:
    objects sent. ``calls``: calls made; ``failures``: those of them that failed; ``skipped``: calls not
    made because the remote was down. ``pending``: objects that wait to be sent.
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
    """This tenant's objects in a store's ``directory`` (else in memory), and counters of the tiers."""

    url: str
    canonicals: int
    patches: int
    encodings: int
    anchors: int
    bytes: int
    memory: MemoryStats
    remote: RemoteStats | None = None
    directory: bool = False
    conditioned: int = 0

    @property
    def objects(self) -> int:
        """Number of objects of all kinds."""
        return self.canonicals + self.patches + self.encodings + self.anchors + self.conditioned


@dataclass(frozen=True)
class Removed:
    """An object that `StoreAdmin.gc` removed: its key, kind, size, value (`eviction`) and the reason."""

    key: str
    kind: str
    bytes: int
    value: float
    reason: str


@dataclass(frozen=True)
class Collected:
    """Report of `StoreAdmin.gc`: objects found and objects removed; after a dry run, those it would remove.

    ``leftovers``: files of dead writers that were removed. ``quarantined``: copies in quarantine that
    were removed, which is only done on request.
    """

    objects_before: int
    bytes_before: int
    objects_after: int
    bytes_after: int
    removed: tuple[Removed, ...]
    leftovers: int = 0
    quarantined: int = 0


class Put(NamedTuple):
    """What became of a record that was put: its key, and the error that refused it, if any.

    ``stored``: False if an object that was there already is kept instead.
    """

    key: str
    error: Exception | None
    stored: bool = False


@dataclass(frozen=True)
class FlushReport:
    """Names of the objects that the remote does not have yet. Both empty: all that was put is safe there.

    ``unsaved`` objects wait: in the cache directory, where they survive and are sent when the store is next
    opened, or, without one, in memory only. ``dropped`` objects found no room in memory and are lost.
    """

    unsaved: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of reading every object once.

    ``ok``: objects whose every byte is as it was written. ``quarantined``: one line per damaged
    object, now out of the store. ``refused``: one line per object that was left in place because
    this version, or this caller, cannot read it. ``orphan_files``: objects the index did not list, and
    lists now. ``orphan_rows``: rows without an object, now gone. ``stale``: files of writers that
    died, now gone.
    """

    ok: int
    quarantined: tuple[str, ...]
    refused: tuple[str, ...]
    orphan_files: int = 0
    orphan_rows: int = 0
    stale: int = 0


@dataclass(frozen=True)
class Quarantined:
    """A damaged object ``name`` set aside as ``file``; ``when`` in seconds since 1970. The log says why."""

    file: str
    name: str
    bytes: int
    when: float

    @classmethod
    def of(cls, file: str, size: int) -> Quarantined | None:
        """The copy of ``size`` bytes in a file named by an object and a time in ns; None for another file."""
        match = _COPY.fullmatch(file)
        return None if match is None else cls(file, match[1], size, int(match[2]) / 1e9)
