"""Look-back search: the stored pictures most similar to a given one (`docs/stores.md`).

Every canonical with pictures has an embedding in its header (`search.embedding`). A process that searches
holds those of a context in one matrix, and compares its names with those that are stored first. All rows are
compared with a query: nothing is trained, and nothing missed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kamera.errors import UnknownChunk
from kamera.store.codec import UNREADABLE, Codec
from kamera.store.keys import Context, canonical_key
from kamera.store.search.embedding import unit_vector, unpack
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


class _Pictures:
    """What is known of a context: all ``names``, and a row for each embedding. Not for threads."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._rows: list[tuple[str, str]] = []  # name and chunk id
        self._vectors = np.zeros((0, 0), dtype=np.float32)

    def keep(self, names: Collection[str]) -> None:
        """Let go of all objects but these."""
        if not self.names.issubset(names):
            indices = [i for i, (name, _) in enumerate(self._rows) if name in names]
            self._rows, self._vectors = [self._rows[i] for i in indices], self._vectors[indices]
            self.names.intersection_update(names)

    def add(self, objects: Iterable[tuple[str, str, np.ndarray | None]]) -> None:
        """Take objects: name, chunk id and unit vector ``[width]`` (None: it is never found)."""
        rows: list[tuple[str, str]] = []
        vectors: list[np.ndarray] = []
        for name, chunk_id, vector in objects:
            self.names.add(name)
            width = self._vectors.shape[1] if self._rows else len(vectors[0]) if vectors else None
            if vector is not None and width not in (None, len(vector)):
                logger.warning("not searchable: %s has an embedding of another width", name)
            elif vector is not None:
                rows.append((name, chunk_id))
                vectors.append(vector)
        if rows:
            self._vectors = np.concatenate([self._vectors, vectors] if self._rows else [vectors])
            self._rows += rows

    def nearest(self, query: np.ndarray, k: int) -> list[tuple[str, Hit]]:
        """The ``k`` objects with the largest inner product with ``query`` ``[width]``, best first."""
        if not self._rows:
            return []
        if query.shape != self._vectors.shape[1:]:
            raise ValueError(
                f"a query of shape {query.shape} among embeddings of width {self._vectors.shape[1]}"
            )
        scores = self._vectors @ query
        best = np.argsort(-scores, kind="stable")[:k]
        return [(self._rows[i][0], Hit(self._rows[i][1], min(float(scores[i]), 1.0))) for i in best]


class LookBack:
    """The pictures of the canonicals in a directory, or else in memory. Safe from several threads."""

    def __init__(self, tiers: Tiers, codec: Codec) -> None:
        self._tiers = tiers
        self._codec = codec
        self._pictures: dict[Context, _Pictures] = {}
        self._lock = threading.RLock()

    def ask(self, context: Context, query: Query, k: int) -> list[Hit]:
        """`ChunkStore.search`; raises `ValueError` for a ``k`` below 1, too."""
        if k < 1:
            raise ValueError(f"k {k} must be at least 1")
        chunk = query if isinstance(query, str) else getattr(query, "id", None)
        if not isinstance(chunk, str):
            return self._nearest(context, _direction(query), k)
        vector = self.embedding(context, chunk)
        if vector is None:
            raise UnknownChunk(
                f"no embedding of chunk {chunk[:12]!r} is stored in this context: it is not there, or holds "
                "no picture; give a stored picture's chunk, or ask kamera.window.search, which encodes"
            )
        return [hit for hit in self._nearest(context, vector, k + 1) if hit.chunk_id != chunk][:k]

    def embedding(self, context: Context, chunk_id: str) -> np.ndarray | None:
        """Unit vector ``[width]`` of a stored chunk; None for one without pictures, or not stored."""
        return self._read_header(self._codec.name(canonical_key(context, chunk_id)))[1]

    def forget(self, names: Iterable[str]) -> None:
        """Let go of objects that are gone."""
        gone_names = set(names)
        with self._lock:
            for pictures in self._pictures.values():
                pictures.keep(pictures.names - gone_names)

    def _nearest(self, context: Context, query: np.ndarray, k: int) -> list[Hit]:
        with self._lock:
            while True:
                named_hits = self._update_pictures(context).nearest(query, k)
                present_names = self._tiers.stored_names([name for name, _ in named_hits])
                gone_names = [name for name, _ in named_hits if name not in present_names]
                if not gone_names:
                    return [hit for _, hit in named_hits]
                self.forget(gone_names)

    def _update_pictures(self, context: Context) -> _Pictures:
        """What this process knows of a context, brought up to what is stored now."""
        pictures = self._pictures.setdefault(context, _Pictures())
        if self._tiers.disk is not None:
            names = self._tiers.disk.index.names_of("canonical", context)
        else:
            infos = self._tiers.memory.infos()
            names = [info.key for info in infos if info.kind == "canonical" and info.context == context]
        pictures.keep(set(names))
        pictures.add([(name, *self._read_header(name)) for name in names if name not in pictures.names])
        return pictures

    def _read_header(self, name: str) -> tuple[str, np.ndarray | None]:
        """The chunk id of an object and its embedding, by its header."""
        try:
            if self._tiers.disk is not None:
                header = self._tiers.disk.header(name)
            else:
                record_and_info = self._tiers.memory.peek(name)
                header = None if record_and_info is None else record_and_info[0].header()
            if header is not None:
                return header["chunk_id"], unpack(header["embedding"])
        except (*UNREADABLE, KeyError, TypeError, ValueError) as error:
            logger.warning("not searchable: %s: %s", name, error)
        return "", None


def _direction(query: Any) -> np.ndarray:
    try:
        values = torch.as_tensor(query).detach().to(device="cpu", dtype=torch.float64).numpy()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{type(query).__name__} is no query: give a chunk, its id, or a vector") from None
    vector = unit_vector(values) if values.ndim == 1 else None
    if vector is None:
        raise ValueError(
            f"a query of shape {tuple(values.shape)} has no direction: give one finite vector, not all zeros"
        )
    return vector
