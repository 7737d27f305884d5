"""Look-back search: the stored pictures most similar to a given one (`docs/search.md`).

Every canonical with pictures has an embedding (`kamera.store.search.embedding`), kept in rows that all
processes share (`kamera.store.search.vectors`); a searching process holds a FAISS index of them
(`kamera.store.search.nearest`) and brings it up to date first. The objects of the store are the truth: a
row without its object is never a hit, and an object without its row gets one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, UnknownChunk, WrongKey
from kamera.ops import digest
from kamera.store.codec import Codec
from kamera.store.disk.database import Unusable
from kamera.store.encoding import EncodingRecord
from kamera.store.keys import Context, canonical_key, encoding_context, is_key, object_key
from kamera.store.records import CanonicalRecord, Record
from kamera.store.search.embedding import embedding_of, unit
from kamera.store.search.nearest import Nearest
from kamera.store.search.vectors import DiskVectors, Fresh, MemoryVectors, Row, Vectors
from kamera.store.tiers import Tiers

logger = logging.getLogger(__name__)


class HasId(Protocol):
    """A chunk, as the store sees it."""

    @property
    def id(self) -> str: ...


Query = str | HasId | torch.Tensor | np.ndarray | Sequence[float]
"""A stored chunk's id, a stored chunk, or a vector ``[width]`` of any length."""


@dataclass(frozen=True)
class Hit:
    """A stored chunk, and the cosine of its embedding and the query's (1.0: the same direction)."""

    chunk_id: str
    score: float


@dataclass(frozen=True)
class NearDuplicate:
    """Two similar stored chunks, the one stored first in front, and their cosine."""

    chunk_id: str
    other: str
    score: float


@dataclass(frozen=True)
class Objects:
    """The interface of the searched store.

    ``name``: that of a chunk's canonical. ``encoding``: the name of a canonical's encoding. ``present``: the
    stored ones of some names (in one call: it may query a remote). ``canonicals``: names of all canonicals.
    ``read``: an object.
    """

    name: Callable[[Context, str], str]
    encoding: Callable[[CanonicalRecord], str]
    present: Callable[[Sequence[str]], Collection[str]]
    canonicals: Callable[[Context], Iterable[str]]
    read: Callable[[str], Record | None]


class Search:
    """The embeddings of one store. Safe to use from several threads and processes.

    ``vectors`` opens the storage of rows; there the space of a context is named ``veil`` of its digest. If it
    cannot be used, rows are kept in memory. `add`, `drop` and `embedding` need no FAISS; the others raise
    `StoreError` without it.
    """

    def __init__(
        self,
        objects: Objects,
        vectors: Callable[[], Vectors],
        veil: Callable[[str], str],
    ) -> None:
        self._objects = objects
        self._open = vectors
        self._veil = veil
        self._held: Vectors | None = None
        self._known: dict[Context, Nearest] = {}
        self._lock = threading.RLock()

    # -- queries -------------------------------------------------------------------------------

    def ask(self, context: Context, query: Query, k: int) -> list[Hit]:
        """The ``k`` stored chunks most similar to ``query``, best first; a chunk is no hit for itself.

        Raises `UnknownChunk` for a chunk without a stored embedding, `ValueError` for a vector without
        direction or of another width than the store's, or a ``k`` below 1.
        """
        if k < 1:
            raise ValueError(f"k {k} must be at least 1")
        chunk = query if isinstance(query, str) else getattr(query, "id", None)
        if not isinstance(chunk, str):
            return self._nearest(context, _direction(query), k)
        vector = self.embedding(context, chunk)
        if vector is None:
            raise UnknownChunk(
                f"no embedding of chunk {chunk[:12]!r} is stored in this context: it is not there, or holds "
                "no picture; give a stored picture's chunk, or ask window.search, which encodes"
            )
        return [hit for hit in self._nearest(context, vector, k + 1) if hit.chunk_id != chunk][:k]

    def pairs(self, context: Context, threshold: float) -> list[NearDuplicate]:
        """Pairs of stored chunks with a cosine of at least ``threshold``, the most alike first."""
        if not -1.0 <= threshold <= 1.0:
            raise ValueError(f"threshold {threshold} is no cosine: give -1.0 to 1.0")
        with self._lock:
            known = self._caught_up(context)
            pairs = list(known.pairs(threshold))
            named = {row.name for one, other, _ in pairs for row in (one, other)}
            there = self._objects.present(sorted(named))
            found = [
                NearDuplicate(one.chunk_id, other.chunk_id, score)
                for one, other, score in pairs
                if one.name in there and other.name in there
            ]
        return sorted(found, key=lambda pair: (-pair.score, pair.chunk_id, pair.other))

    def embedding(self, context: Context, chunk_id: str) -> np.ndarray | None:
        """Unit vector ``[width]`` of a stored chunk; None for one without pictures, or not stored."""
        name = self._objects.name(context, chunk_id)
        if not self._objects.present([name]):
            return None
        try:
            row = self._vectors.get(name)
        except Unusable:
            self._in_memory()
            row = None
        return self._make(name)[1] if row is None else row.vector

    # -- updates from the store ----------------------------------------------------------------

    def add(self, stored: Sequence[tuple[str, CanonicalRecord]]) -> None:
        """Store the embeddings of canonicals that were just stored, by name.

        If that fails the objects are stored nevertheless, and the next search makes the rows.
        """
        rows: list[Fresh] = []
        for name, record in stored:
            try:
                rows += self._row(name, record)
            except (StoreError, OSError) as error:
                logger.warning("no embedding kept of %s: %s", name, error)
        try:
            if rows:
                self._vectors.put(rows)
        except (StoreError, OSError) as error:
            logger.warning("no embedding kept of %s: %s", ", ".join(row.name for row in rows), error)

    def met(self, name: str, record: CanonicalRecord) -> None:
        """`add`, for an object written elsewhere, which may have its row already."""
        if not self._vectors.has(name):
            self.add([(name, record)])

    def drop(self, names: Iterable[str]) -> None:
        """Forget embeddings: afterwards they are neither on the disk nor in this process.

        If the disk refuses, they stay there without their objects, and are never found.
        """
        gone = list(names)
        try:
            self._vectors.drop(gone)
        except Unusable as error:
            logger.warning("embeddings of %d objects that are gone stay for now: %s", len(gone), error)
            self._in_memory()
        with self._lock:
            for context, known in list(self._known.items()):
                self._follow(known, context)

    def kept(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` whose embedding is kept."""
        return [name for name in names if self._vectors.has(name)]

    def scrub(self) -> list[str]:
        """Erase all traces of dropped embeddings; return the possible remains and the reasons."""
        why = self._vectors.scrub() if isinstance(self._vectors, DiskVectors) else None
        return [] if why is None else [why]

    def check(self, contexts: Iterable[Context]) -> list[str]:
        """Compare every row with the store and correct it; return one line per kind of difference."""
        try:
            return self._checked(contexts)
        except Unusable as error:
            return [f"embeddings were not checked: {error}"]

    def _checked(self, contexts: Iterable[Context]) -> list[str]:
        told: list[str] = []
        problem = self._vectors.check() if isinstance(self._vectors, DiskVectors) else None
        if problem is not None:
            told.append(f"embeddings unreadable ({problem}): made anew from the objects")
        for context in contexts:
            rows = self._vectors.after(self._space(context), 0)
            damaged = [row for row in rows if not isinstance(row, Row)]
            self._vectors.discard(damaged)
            made, dropped = self._reconcile(context)
            if made or dropped:
                where = f"{context.fingerprint[:12]}/{context.anchor[:12]}"
                told.append(
                    f"embeddings of context {where}: {made} made anew ({len(damaged)} were damaged), "
                    f"{dropped} without their object dropped"
                )
        return told

    def close(self) -> None:
        """Close the rows; nothing works afterwards."""
        with self._lock:
            self._known.clear()
            if isinstance(self._held, DiskVectors):
                self._held.close()

    # -- inside --------------------------------------------------------------------------------

    @property
    def _vectors(self) -> Vectors:
        with self._lock:
            if self._held is None:
                self._held = self._open()
            return self._held

    def _space(self, context: Context) -> str:
        fields = (context.fingerprint, context.anchor, context.tenant, context.kv)
        return self._veil(digest("kamera.search.v1", *fields))

    def _nearest(self, context: Context, query: np.ndarray, k: int) -> list[Hit]:
        with self._lock:
            while True:
                found = self._caught_up(context).nearest(query, k)
                there = self._objects.present([row.name for row, _ in found])
                gone = [row.name for row, _ in found if row.name not in there]
                if not gone:
                    return [Hit(row.chunk_id, score) for row, score in found]
                self.drop(gone)

    def _caught_up(self, context: Context) -> Nearest:
        """This process's index of a context, brought up to date with the stored objects."""
        try:
            return self._followed(context)
        except Unusable as error:
            logger.warning("searching in memory for now: %s", error)
            self._in_memory()
            return self._followed(context)

    def _in_memory(self) -> None:
        """Keep the rows in this process from now on: their file cannot be used."""
        with self._lock:
            self._known.clear()
            if isinstance(self._held, DiskVectors):
                self._held.close()
                self._held = MemoryVectors(self._objects.present)

    def _followed(self, context: Context) -> Nearest:
        while True:
            known = self._known.get(context)
            if known is None:
                known = Nearest(self._vectors.state(self._space(context)).epoch)
                made, dropped = self._reconcile(context)
                if made or dropped:
                    logger.warning("embeddings: %d made anew, %d without their object", made, dropped)
                self._known[context] = known
            self._follow(known, context)
            if self._known.get(context) is known:  # else the rows were lost meanwhile
                return known

    def _follow(self, known: Nearest, context: Context) -> None:
        space = self._space(context)
        state = self._vectors.state(space)
        if state.epoch != known.epoch:
            self._known.pop(context, None)
            return
        if state.last > known.last:
            damaged = known.take(self._vectors.after(space, known.last))
            if damaged:
                logger.warning("%d damaged embeddings are made anew from their objects", len(damaged))
                self._vectors.discard(damaged)
                self._reconcile(context)
                self._follow(known, context)
                return
        if len(known.rows) != state.rows:
            known.keep(set(self._vectors.names(space).values()))
            if len(known.rows) != state.rows and self._vectors.state(space) == state:
                self._vectors.damaged(f"{len(known.rows)} rows of {state.rows} can be read")

    def _reconcile(self, context: Context) -> tuple[int, int]:
        """Make missing rows, drop those without an object; return the number of each."""
        held = self._vectors.names(self._space(context)).keys()
        stored = set(self._objects.canonicals(context))
        loose = held - stored
        there = self._objects.present([name for name in loose if is_key(name)])  # a name may be damaged
        gone = [name for name in loose if name not in there]
        if gone:
            self._vectors.drop(gone)
        made = sum(self._make(name)[0] for name in sorted(stored - held))
        return made, len(gone)

    def _make(self, name: str) -> tuple[bool, np.ndarray | None]:
        """Write the row of a stored object; return True if it could, and the embedding."""
        record = self._read(name)
        rows = self._row(name, record) if isinstance(record, CanonicalRecord) else []
        if rows:
            self._vectors.put(rows)
        return bool(rows), rows[0].vector if rows else None

    def _row(self, name: str, record: CanonicalRecord) -> list[Fresh]:
        """Its row; none of a canonical whose encoding is gone, until the chunk is encoded again."""
        encoding = self._read(self._objects.encoding(record)) if record.vision else None
        if not isinstance(encoding, EncodingRecord):
            if record.vision:
                return []
            encoding = None
        return [Fresh(self._space(record.context), name, record.chunk_id, embedding_of(record, encoding))]

    def _read(self, name: str) -> Record | None:
        try:
            return self._objects.read(name)
        except (CorruptChunk, StoreVersionError, WrongKey) as error:
            logger.warning("not searchable: %s", error)
            return None


def _direction(query: Any) -> np.ndarray:
    try:
        values = torch.as_tensor(query).detach().to(device="cpu", dtype=torch.float64).numpy()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{type(query).__name__} is no query: give a chunk, its id, or a vector") from None
    vector = unit(values) if values.ndim == 1 else None
    if vector is None:
        raise ValueError(
            f"a query of shape {tuple(values.shape)} has no direction: give one finite vector, not all zeros"
        )
    return vector


def open_search(tiers: Tiers, codec: Codec, tenant: str) -> Search:
    """Search over the stored objects; with a remote, over those that were put or read here."""
    disk, here = tiers.disk, tiers.memory

    def canonicals(context: Context) -> Iterable[str]:
        if disk is not None:
            return (i.key for i in disk.index.iterate(tenant=tenant, kind="canonical", context=context))
        return (i.key for i in here.infos() if i.kind == "canonical" and i.context == context)

    def vectors() -> Vectors:
        if disk is None or disk.read_only:
            return MemoryVectors(tiers.present)
        return DiskVectors(disk.root / "search" / "vectors.sqlite", codec)

    objects = Objects(
        name=lambda context, chunk: codec.name(canonical_key(context, chunk)),
        encoding=lambda made: codec.name(
            object_key("encoding", encoding_context(made.vision, tenant), made.chunk_id)
        ),
        present=tiers.present,
        canonicals=canonicals,
        read=tiers.get,
    )
    return Search(objects, vectors, codec.veil)
