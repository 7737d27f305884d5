"""One FAISS index in the memory of one process: the nearest of many unit vectors by inner product.

Exhaustive, in half precision: 100,000 vectors of width 1024 take 200 MB and 30 ms a query on one
core (`docs/search.md`), so nothing has to be trained and nothing is missed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kamera.errors import StoreError
from kamera.store.search.vectors import Row

logger = logging.getLogger(__name__)

_BLOCK = 256  # vectors added or queried at a time


class Nearest:
    """Rows by number, and the index of those that have a vector. Not safe to use from several threads.

    ``epoch`` and ``last`` identify the rows it has seen. Raises `StoreError` without FAISS.
    """

    def __init__(self, epoch: str) -> None:
        self._faiss = _faiss()
        self.epoch = epoch
        self.last = 0
        self.rows: dict[int, Row] = {}
        self._index: Any = None

    @property
    def width(self) -> int | None:
        """Length of its vectors, None while there is none."""
        return None if self._index is None else int(self._index.d)

    def take(self, rows: Iterable[Row | int]) -> list[int]:
        """Add rows; return the numbers of damaged ones."""
        damaged: list[int] = []
        seqs: list[int] = []
        vectors: list[np.ndarray] = []
        for row in rows:
            if not isinstance(row, Row):
                damaged.append(row)
                continue
            self.last = row.seq
            self.rows[row.seq] = row._replace(vector=None)
            if row.vector is not None and row.vector.shape[0] != (self._width_of(row.vector)):
                logger.warning("not searchable: %s has an embedding of another width", row.name)
            elif row.vector is not None:
                seqs.append(row.seq)
                vectors.append(row.vector)
            if len(seqs) == _BLOCK:
                self._add(seqs, vectors)
                seqs, vectors = [], []
        if seqs:
            self._add(seqs, vectors)
        return damaged

    def keep(self, seqs: set[int]) -> None:
        """Remove every row but these."""
        gone = [seq for seq in self.rows if seq not in seqs]
        for seq in gone:
            del self.rows[seq]
        if self._index is not None and gone:
            self._index.remove_ids(np.array(gone, dtype=np.int64))

    def nearest(self, query: np.ndarray, k: int) -> list[tuple[Row, float]]:
        """The ``k`` rows with the largest inner product with ``query`` ``[width]``, best first."""
        if self._index is None or self._index.ntotal == 0:
            return []
        if query.shape != (self._index.d,):
            raise ValueError(f"a query of shape {query.shape} among embeddings of width {self._index.d}")
        scores, seqs = self._index.search(query[None], min(k, self._index.ntotal))
        found = zip(seqs[0], scores[0], strict=True)
        return [(self.rows[int(seq)], min(float(score), 1.0)) for seq, score in found]

    def pairs(self, threshold: float) -> Iterator[tuple[Row, Row, float]]:
        """All pairs of rows with an inner product above ``threshold``, the older one first."""
        total = 0 if self._index is None else self._index.ntotal
        below = float(np.nextafter(np.float32(threshold), np.float32(-2)))
        for start in range(0, total, _BLOCK):
            count = min(_BLOCK, total - start)
            own = self._faiss.vector_to_array(self._index.id_map)[start : start + count]
            queries = self._index.index.reconstruct_n(start, count)
            limits, scores, seqs = self._index.range_search(queries, below)
            for i, seq in enumerate(own):
                for j in range(limits[i], limits[i + 1]):
                    if seqs[j] > seq:
                        yield self.rows[int(seq)], self.rows[int(seqs[j])], min(float(scores[j]), 1.0)

    def _width_of(self, vector: np.ndarray) -> int:
        if self._index is None:
            width = vector.shape[0]
            half = self._faiss.ScalarQuantizer.QT_fp16
            flat = self._faiss.IndexScalarQuantizer(width, half, self._faiss.METRIC_INNER_PRODUCT)
            self._index = self._faiss.IndexIDMap2(flat)
        return int(self._index.d)

    def _add(self, seqs: list[int], vectors: list[np.ndarray]) -> None:
        self._index.add_with_ids(np.stack(vectors), np.array(seqs, dtype=np.int64))


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise StoreError("search needs FAISS: pip install 'kamera[search]'") from None
    return faiss
