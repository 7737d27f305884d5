"""One FAISS index in the memory of one process: the nearest of many unit vectors by inner product.

Exhaustive, in half precision: 100,000 vectors of width 1024 take 200 MB and 30 ms a query on one
core (`docs/search.md`), so nothing has to be trained and nothing is missed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import numpy as np

from kamera.errors import StoreError

logger = logging.getLogger(__name__)

_BLOCK = 256  # vectors added or queried at a time


class SearchRow(NamedTuple):
    """The object of a vector."""

    name: str
    chunk_id: str


class Nearest:
    """An index of vectors by object. Not safe to use from several threads.

    Raises `StoreError` without FAISS.
    """

    def __init__(self) -> None:
        self._faiss = _faiss()
        self._index: Any = None
        self._numbers: dict[str, int] = {}  # of every object it was told of, with a vector or without
        self._rows: dict[int, SearchRow] = {}
        self._next = 0

    @property
    def names(self) -> Set[str]:
        """The objects it was told of."""
        return self._numbers.keys()

    def add(self, rows: Iterable[tuple[SearchRow, np.ndarray | None]]) -> None:
        """Take objects with their vectors ``[width]`` (None: it is never found), in this order."""
        numbers: list[int] = []
        vectors: list[np.ndarray] = []
        for row, vector in rows:
            self._numbers[row.name] = number = self._next
            self._rows[number], self._next = row, number + 1
            if vector is not None and vector.shape[0] != self._width_of(vector):
                logger.warning("not searchable: %s has an embedding of another width", row.name)
            elif vector is not None:
                numbers.append(number)
                vectors.append(vector)
        for start in range(0, len(numbers), _BLOCK):
            block = slice(start, start + _BLOCK)
            self._index.add_with_ids(np.stack(vectors[block]), np.array(numbers[block], dtype=np.int64))

    def drop(self, names: Iterable[str]) -> None:
        """Let go of objects."""
        gone = [self._numbers.pop(name) for name in names]
        for number in gone:
            del self._rows[number]
        if self._index is not None and gone:
            self._index.remove_ids(np.array(gone, dtype=np.int64))

    def nearest(self, query: np.ndarray, k: int) -> list[tuple[SearchRow, float]]:
        """The ``k`` rows with the largest inner product with ``query`` ``[width]``, best first."""
        if self._index is None or self._index.ntotal == 0:
            return []
        if query.shape != (self._index.d,):
            raise ValueError(f"a query of shape {query.shape} among embeddings of width {self._index.d}")
        scores, seqs = self._index.search(query[None], min(k, self._index.ntotal))
        found = zip(seqs[0], scores[0], strict=True)
        return [(self._rows[int(seq)], min(float(score), 1.0)) for seq, score in found]

    def _width_of(self, vector: np.ndarray) -> int:
        if self._index is None:
            width = vector.shape[0]
            half = self._faiss.ScalarQuantizer.QT_fp16
            flat = self._faiss.IndexScalarQuantizer(width, half, self._faiss.METRIC_INNER_PRODUCT)
            self._index = self._faiss.IndexIDMap2(flat)
        return int(self._index.d)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise StoreError("search needs FAISS: pip install 'kamera[search]'") from None
    return faiss
