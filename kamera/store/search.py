"""Look-back search: the stored pictures most similar to a given one, by faiss (`docs/stores.md`).

The embedding of a chunk is the mean of its vision features: those that the decoder receives in the place of
picture tokens. They were computed before the decoder, so neither the anchor nor anything else in a window is
in them. DeepStack features are extra layers of the same pictures and are left out. It stands in the header
of the chunk's canonical.

A context has an index of its own, which only repeats what those headers say. It is compared with the names
that are stored before each answer, and its file, ``search/NAME``, saves reading the headers again: a lost,
damaged or foreign one is made anew.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, UnknownChunk, WrongKey
from kamera.files import Folder, publish_file
from kamera.ops import digest
from kamera.store.keys import Context, canonical_key, is_key

if TYPE_CHECKING:
    from kamera.store.records import CanonicalRecord
    from kamera.store.store import ChunkStore

logger = logging.getLogger(__name__)

FLAT_MOST = 100_000
"""Most pictures of an index that `LookBack.rebuild` makes flat; above, it makes a graph (HNSW)."""

FOLDER = "search"
"""Folder of a store's directory for the files of its indices."""

_LINKS = 32  # of a picture in the graph
_BEAM = 512  # candidates that a search in the graph follows, at least: recall@5 of .994 in 2 ms, 64 gave .889
_SHARE = 10  # a file is written once a tenth of its rows is new: writing costs all of them
_MAGIC = b"kamera-search-1\n"
_DIGEST = 32


Query = Any
"""A stored chunk (or anything with its id), its id, or a vector ``[width]`` of any length."""


@dataclass(frozen=True)
class Hit:
    """A stored chunk, and the cosine of its embedding and the query's (1.0: the same direction)."""

    chunk_id: str
    score: float


# -- embeddings ------------------------------------------------------------------------------------


def mean_features(
    input_ids: torch.Tensor, embeds: Mapping[str, torch.Tensor], vision_tokens: Sequence[int]
) -> np.ndarray | None:
    """Unit vector ``[width]`` (float32) of a chunk, None for one without pictures.

    ``input_ids`` ``[S]``; ``embeds["inputs_embeds"]`` ``[1, S, width]``, averaged over the positions of
    ``vision_tokens`` and normalised. None, too, for features that are zero or not finite.
    """
    features = embeds.get("inputs_embeds")
    if features is None or not vision_tokens:
        return None
    vision_mask = torch.isin(input_ids, torch.tensor(list(vision_tokens)))
    rows = features.reshape(-1, features.shape[-1])
    if rows.shape[0] != vision_mask.shape[0] or not bool(vision_mask.any()):
        return None
    mean = rows[vision_mask.to(rows.device)].to(device="cpu", dtype=torch.float64).mean(0)
    return unit_vector(mean.numpy())


def picture_embedding(
    input_ids: torch.Tensor, embeds: Mapping[str, torch.Tensor], vision_tokens: Sequence[int]
) -> str:
    """The `mean_features` of a chunk's pictures as its record holds them; "" without pictures."""
    return pack(mean_features(input_ids, embeds, vision_tokens))


def unit_vector(vector: np.ndarray) -> np.ndarray | None:
    """``vector`` at length 1, float32; None if it has no direction."""
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0.0:
        return None
    scaled: np.ndarray = (vector / length).astype(np.float32)
    return scaled


def pack(vector: np.ndarray | None) -> str:
    """A unit vector as text, in half precision; "" for none."""
    return "" if vector is None else base64.b64encode(vector.astype("<f2").tobytes()).decode()


def unpack(text: str) -> np.ndarray | None:
    """The vector ``[width]`` (float32) of `pack`. Raises `ValueError` for another text."""
    vector = np.frombuffer(base64.b64decode(text, validate=True), "<f2").astype(np.float32)
    if not np.isfinite(vector).all():
        raise ValueError(f"an embedding of {len(vector)} features that are not all finite")
    return vector if len(vector) else None


# -- the index of a context ------------------------------------------------------------------------


class _Index:
    """What is known of a context: every object's name, and a vector for each embedding. Not for threads.

    The vector of a dropped object becomes zeros at once and is never found; its row stays until the next
    `remake`, since faiss cannot take a picture out of a graph.
    """

    def __init__(self) -> None:
        self.rows_by_name: dict[str, int | None] = {}  # None: without an embedding
        self.unsaved = 0  # names that came or went since the file was written
        self.version: tuple[int, ...] = ()  # of the directory's rows when all names were compared
        self._rows: list[tuple[str, str] | None] = []  # name and chunk id; None: dropped
        self._dropped: set[int] = set()
        self._unread: set[str] = set()  # names that no file repeats: their objects may yet be read
        self._faiss: Any = None  # made with the first vector, whose width it has
        self._live: Any = None  # selects the rows that are not dropped; made by the next search

    @property
    def pictures(self) -> int:
        """Number of pictures that may be found."""
        return len(self._rows) - len(self._dropped)

    def add(self, objects: Iterable[tuple[str, str, np.ndarray | None]]) -> None:
        """Take objects: name, chunk id and unit vector ``[width]`` (None: it is never found).

        One that could not be read has no chunk id.
        """
        for name, chunk_id, vector in objects:
            if name in self.rows_by_name:
                continue
            self.unsaved += 1
            self.rows_by_name[name] = None
            if vector is not None and self._faiss is None:
                self._faiss = _flat(len(vector))
            if vector is not None and len(vector) == self._faiss.d:
                self._faiss.add(vector[None])
                self.rows_by_name[name] = len(self._rows)
                self._rows.append((name, chunk_id))
            elif vector is not None:
                logger.warning("not searchable: %s has an embedding of another width", name)
            if not chunk_id or (vector is not None and self.rows_by_name[name] is None):
                self._unread.add(name)

    def drop(self, names: Collection[str]) -> bool:
        """Let go of objects; True if any of them was here."""
        gone = [name for name in names if name in self.rows_by_name]
        self.unsaved += len(gone)
        self._unread.difference_update(gone)
        rows = [row for name in gone if (row := self.rows_by_name.pop(name)) is not None]
        if rows:
            self._vectors()[rows] = 0.0
            for row in rows:
                self._rows[row] = None
            self._dropped.update(rows)
            self._live = None
            if not self._is_graph and len(self._dropped) * 4 > len(self._rows):
                self.remake(graph=False)
        return bool(gone)

    def nearest(self, query: np.ndarray, k: int) -> list[tuple[str, Hit]]:
        """The ``k`` objects with the largest inner product with ``query`` ``[width]``, best first."""
        if self._faiss is None:
            return []
        if query.shape != (self._faiss.d,):
            raise ValueError(f"a query of shape {query.shape} among embeddings of width {self._faiss.d}")
        faiss = _faiss()
        if self._dropped and self._live is None:
            self._live = faiss.IDSelectorNot(faiss.IDSelectorBatch(sorted(self._dropped)))
        options: dict[str, Any] = {"sel": self._live} if self._dropped else {}
        if self._is_graph:
            parameters = faiss.SearchParametersHNSW(**options, efSearch=max(_BEAM, 2 * k))
        else:
            parameters = faiss.SearchParameters(**options)
        k = min(k, len(self._rows))
        scores, rows = self._faiss.search(query[None], k, params=parameters)
        hits = []
        for score, row in sorted(zip(-scores[0], rows[0], strict=True)):
            entry = self._rows[row] if row >= 0 else None  # there are fewer than k
            if entry is not None:
                hits.append((entry[0], Hit(entry[1], min(-float(score), 1.0))))
        return hits

    def remake(self, *, graph: bool) -> None:
        """Make it anew of what was not dropped, flat or as a graph."""
        if self._faiss is None:
            return
        faiss = _faiss()
        live = [row for row, entry in enumerate(self._rows) if entry is not None]
        vectors, width = self._vectors()[live], self._faiss.d
        self._rows = [self._rows[row] for row in live]
        self.rows_by_name.update((entry[0], row) for row, entry in enumerate(self._rows) if entry)
        self._dropped, self._live, self._faiss = set(), None, None
        if live:
            inner = faiss.METRIC_INNER_PRODUCT
            self._faiss = faiss.IndexHNSWFlat(width, _LINKS, inner) if graph else _flat(width)
            self._faiss.add(vectors)

    def parts(self, where: str, key: bytes) -> Iterator[bytes | memoryview]:
        """Its file under the name ``where``, whose digest is keyed by ``key``."""
        blank = [name for name, row in self.rows_by_name.items() if row is None and name not in self._unread]
        text = json.dumps({"name": where, "rows": self._rows, "blank": blank}).encode()
        body: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        if self._faiss is not None:
            faiss = _faiss()
            body.append(faiss.serialize_index(self._faiss).data)
        yield _MAGIC
        yield _digest(body, key)
        yield from body

    @classmethod
    def of(cls, data: bytes, where: str, key: bytes) -> _Index:
        """The index of `parts`; nothing is parsed before the digest matches. Raises `ValueError`."""
        start = len(_MAGIC) + _DIGEST
        view = memoryview(data)
        if view[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is no index of this format")
        if not hmac.compare_digest(view[len(_MAGIC) : start], _digest([view[start:]], key)):
            raise ValueError("its digest does not match: it is damaged, or somebody else wrote it")
        end = start + 8 + int.from_bytes(view[start : start + 8], "little")
        header = json.loads(bytes(view[start + 8 : end]))
        if header["name"] != where:
            raise ValueError(f"it was written as {header['name']}")
        index = cls()
        index._rows = [None if entry is None else (entry[0], entry[1]) for entry in header["rows"]]
        index._dropped = {row for row, entry in enumerate(index._rows) if entry is None}
        index.rows_by_name = {name: None for name in header["blank"]}
        index.rows_by_name.update((entry[0], row) for row, entry in enumerate(index._rows) if entry)
        if end < len(data):
            faiss = _faiss()
            index._faiss = faiss.deserialize_index(np.frombuffer(view[end:], np.uint8))
        if (0 if index._faiss is None else index._faiss.ntotal) != len(index._rows):
            raise ValueError("its names and vectors are not as many")
        return index

    @property
    def _is_graph(self) -> bool:
        return hasattr(self._faiss, "hnsw")

    def _vectors(self) -> np.ndarray:
        """The vectors ``[rows, width]`` themselves, no copy."""
        faiss = _faiss()
        flat: Any = faiss.downcast_index(self._faiss.storage) if self._is_graph else self._faiss
        vectors: np.ndarray = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d)
        return vectors.reshape(flat.ntotal, flat.d)


def _faiss() -> Any:
    """The library, loaded at need: it takes .3 s. Its OpenMP is torch's: no count of threads is set here."""
    import faiss

    return faiss


def _flat(width: int) -> Any:
    """An empty index that compares all its vectors with a query."""
    return _faiss().IndexFlatIP(width)


def _digest(parts: Iterable[bytes | memoryview], key: bytes) -> bytes:
    hasher = hashlib.blake2b(key=key, digest_size=_DIGEST)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


# -- all contexts ----------------------------------------------------------------------------------


class LookBack:
    """The pictures of the canonicals in a directory, or else in memory. Safe from several threads.

    What is encrypted has no file: the index is read from the objects by each process that searches.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._codec = codec = store._codec
        self._indices: dict[str, _Index] = {}  # by the name of their files
        self._lock = threading.RLock()
        self.is_asked = False  # has there been any search yet
        is_plain = codec.marker.get("sealed") != "encrypted"
        self._root = store._disk.root if store._disk is not None and is_plain else None

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

    def add(self, name: str, record: CanonicalRecord) -> None:
        """Take what was just put, if its context has been searched: else the next search finds it."""
        if record.kind == "canonical":
            with self._lock:
                index = self._indices.get(self._file_of(record.context))
                if index is not None:
                    index.add([(name, record.chunk_id, unpack(record.embedding))])

    def forget(self, names: Iterable[str]) -> None:
        """Let go of objects that were deleted, in memory and in every file. Raises `StoreError`."""
        gone_names = set(names)
        with self._lock:
            for file in self._files():
                if is_key(file) and file not in self._indices:
                    self._indices[file] = self._load(file)
                elif not is_key(file):  # a writer's: what it writes may be deleted by now
                    self._remove(file)
            for file, index in self._indices.items():
                if index.drop(gone_names):
                    self._remove(file)  # written again by `close`

    def rebuild(self, contexts: Iterable[Context]) -> None:
        """Make the files of ``contexts`` anew from the stored objects, and remove all others."""
        if not self._is_kept:
            return
        with self._lock:
            for file in self._files():
                self._remove(file)
            for context in contexts:
                self._indices.clear()  # one at a time: they may be large
                index = self._indices[self._file_of(context)] = _Index()
                index.add((name, *self._read_header(name)) for name in self._stored_names(context))
                if index.pictures > FLAT_MOST:
                    index.remake(graph=True)
                self._save(self._file_of(context))
            self._indices.clear()

    def close(self) -> None:
        """Write the files of which much is new; the rest is found again by its names."""
        with self._lock:
            for file, index in self._indices.items():
                if index.unsaved * _SHARE > len(index.rows_by_name):
                    self._save(file)
            self._indices.clear()

    @property
    def _is_kept(self) -> bool:
        return self._root is not None and self._store._disk is not None and not self._store._disk.read_only

    def _nearest(self, context: Context, query: np.ndarray, k: int) -> list[Hit]:
        with self._lock:
            while True:
                index = self._update(context)
                named_hits = index.nearest(query, k)
                present_names = self._store._stored_names([name for name, _ in named_hits])
                gone_names = [name for name, _ in named_hits if name not in present_names]
                if not gone_names:
                    return [hit for _, hit in named_hits]
                index.drop(gone_names)

    def _update(self, context: Context) -> _Index:
        """The index of a context, brought up to what is stored now."""
        file = self._file_of(context)
        self.is_asked = True
        if file not in self._indices:
            self._indices[file] = self._load(file)
        index, disk = self._indices[file], self._store._disk
        version = () if disk is None else disk.index.version()  # before the names, which may be newer
        if version and version == index.version:
            return index
        names = self._stored_names(context)
        index.drop(index.rows_by_name.keys() - set(names))
        new_names = [name for name in names if name not in index.rows_by_name]
        index.add((name, *self._read_header(name)) for name in new_names)
        if len(new_names) * _SHARE > len(names):
            self._save(file)
        index.version = version
        return index

    def _stored_names(self, context: Context) -> list[str]:
        """Names of the canonicals of a context."""
        if self._store._disk is not None:
            return self._store._disk.index.canonicals(context)
        infos = self._store._memory.infos()
        return [info.key for info in infos if info.kind == "canonical" and info.context == context]

    def _read_header(self, name: str) -> tuple[str, np.ndarray | None]:
        """The chunk id of an object and its embedding, by its header."""
        try:
            if self._store._disk is not None:
                header = self._store._disk.header(name)
            else:
                held = self._store._memory.peek(name)
                header = None if held is None else held.record.header()
            if header is not None:
                return header["chunk_id"], unpack(header["embedding"])
        except (CorruptChunk, StoreVersionError, WrongKey, KeyError, TypeError, ValueError) as error:
            logger.warning("not searchable: %s: %s", name, error)
        return "", None

    # -- files ---------------------------------------------------------------------------------

    def _file_of(self, context: Context) -> str:
        fields = (context.fingerprint, context.anchor, context.tenant, context.kv)
        return self._codec.name(digest("kamera.search.v1", *fields))

    @staticmethod
    def _folder(root: Path, *, make: bool = False) -> Folder:
        with Folder.at(root) as store:
            return store.sub(FOLDER, make=make)

    def _files(self) -> list[str]:
        if self._root is None:
            return []
        try:
            with self._folder(self._root) as folder:
                return folder.names()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self._root}/{FOLDER}: cannot be listed: {error}") from error

    def _load(self, file: str) -> _Index:
        """The index in a file; an empty one if there is none that can be trusted."""
        try:
            if self._root is not None:
                with self._folder(self._root) as folder:
                    return _Index.of(folder.read(file)[0], file, self._codec.mac_key)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:  # the last is faiss's
            logger.warning("%s/%s/%s is not used, and made anew: %s", self._root, FOLDER, file, error)
        return _Index()

    def _save(self, file: str) -> None:
        """Write an index to its file. Where that cannot be done the next process reads the headers again."""
        if self._root is None or not self._is_kept:
            return
        index = self._indices[file]
        try:
            self._drop_gone(index)
            self._folder(self._root, make=True).close()
            with publish_file(self._root / FOLDER / file) as target:
                for part in index.parts(file, self._codec.mac_key):
                    target.write(part)
            index.unsaved = 0
            if self._drop_gone(index):  # another process deleted it meanwhile, and may have missed the file
                self._remove(file)
        except (OSError, StoreError) as error:
            logger.warning("%s/%s/%s is not written: %s", self._root, FOLDER, file, error)

    def _drop_gone(self, index: _Index) -> bool:
        disk = self._store._disk
        assert disk is not None
        return index.drop([name for name in index.rows_by_name if disk.stamp(name) is None])

    def _remove(self, file: str) -> None:
        if self._root is None:
            return
        try:
            with self._folder(self._root) as folder:
                folder.remove(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"{self._root}/{FOLDER}/{file}: cannot remove: {error}") from error
        if file in self._indices:
            self._indices[file].unsaved = len(self._indices[file].rows_by_name)


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
