"""Listing of many objects by their fronts; a front is read again only when its blob has changed.

If the service marks its blobs (entity tags), a listing without changes reads no blob. If not (Redis), the
first `MARK_BYTES` of all blobs are read, thousands in one round trip: they include the digest of a
plain or sealed object and the nonces of an encrypted one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

from kamera.store.codec import UNREADABLE, Codec
from kamera.store.info import ObjectInfo
from kamera.store.keys import is_key
from kamera.store.remote.blobs import OBJECTS, BlobHead, Blobs
from kamera.store.sources import BytesSource

logger = logging.getLogger(__name__)

FRONT = 32 * 1024
"""Bytes within which the headers of most objects are, those of encrypted ones included."""
MARK_BYTES = 128
BOUND = 50_000
"""Most blobs remembered; those beyond are read each time."""

_BATCH = 256  # fronts read at a time


class Listing:
    """The objects of one tenant by their headers. Safe to use from several threads."""

    def __init__(self, blobs: Blobs, codec: Codec, tenant: str, bound: int = BOUND) -> None:
        self._blobs = blobs
        self._codec = codec
        self._tenant = tenant
        self._bound = bound
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[str, ObjectInfo]] = {}  # by name, with the mark of the blob

    def names(self) -> list[str]:
        """The names of the objects, sorted."""
        return sorted(filter(is_key, self._list()))

    def strangers(self) -> list[str]:
        """Names of foreign keys among them, sorted."""
        return sorted(name for name in self._list() if not is_key(name))

    def infos(self, *, afresh: bool = False) -> Iterator[ObjectInfo]:
        """The readable objects by name; a header is read if it is new, or ``afresh``."""
        marks = self._list()
        with self._lock:
            entries = {} if afresh else self._entries
            unmarked_names = [name for name, mark in marks.items() if mark is None and name in entries]
        if unmarked_names:
            heads = self._blobs.read_heads([OBJECTS + name for name in unmarked_names], MARK_BYTES)
            marks.update(
                (n, None if h is None else _mark_of(h)) for n, h in zip(unmarked_names, heads, strict=True)
            )
        with self._lock:
            # removed blobs make room; the others stay in name order, in which a scan meets them again
            entries = {n: (mark, info) for n, (mark, info) in self._entries.items() if marks.get(n) == mark}
            self._entries = {} if afresh else entries
            entries = dict(self._entries)
        names = sorted(filter(is_key, marks))
        for i in range(0, len(names), _BATCH):
            batch = names[i : i + _BATCH]
            names_to_read = [name for name in batch if name not in entries]
            fronts = dict(zip(names_to_read, self._fronts(names_to_read), strict=True))
            for name in batch:
                info = entries[name][1] if name in entries else self._take(name, fronts[name], marks[name])
                if info is not None:
                    yield info

    def infos_of(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """The objects of these names; None for one that is absent, foreign or cannot be read."""
        return [self._own(name, head) for name, head in zip(names, self._fronts(names), strict=True)]

    def read_info(self, blob: str) -> ObjectInfo | None:
        """The object in a blob whose name begins with its own, of any tenant. Raises as the codec."""
        return self._info(blob, self._blobs.read_heads([blob], FRONT)[0])

    def _list(self) -> dict[str, str | None]:
        start = len(OBJECTS)
        return {n[start:]: mark for n, mark in self._blobs.marks(OBJECTS).items() if n.startswith(OBJECTS)}

    def _fronts(self, names: Sequence[str]) -> list[BlobHead | None]:
        return self._blobs.read_heads([OBJECTS + name for name in names], FRONT) if names else []

    def _take(self, name: str, head: BlobHead | None, mark: str | None) -> ObjectInfo | None:
        info = self._own(name, head)
        with self._lock:
            self._entries.pop(name, None)
            if head is not None and info is not None and len(self._entries) < self._bound:
                self._entries[name] = mark or _mark_of(head), info
        return info

    def _own(self, name: str, head: BlobHead | None) -> ObjectInfo | None:
        try:
            info = self._info(OBJECTS + name, head)
        except UNREADABLE as error:
            logger.warning("not listed: %s", error)  # reading it by name reports the fault, and sets it aside
            return None
        return None if info is None or info.context.tenant != self._tenant else info

    def _info(self, blob: str, head: BlobHead | None) -> ObjectInfo | None:
        if head is None:
            return None
        name = blob.rpartition("/")[2].partition(".")[0]
        return self._codec.read_info(_Front(self._blobs, blob, head), name, f"{self._blobs.url} {blob}")


def _mark_of(head: BlobHead) -> str:
    """What changes with a blob that its service does not mark."""
    return f"{head.size} {head.data[:MARK_BYTES].hex()}"


class _Front(BytesSource):
    """A blob by its front, and by more of it only if that is too short."""

    def __init__(self, blobs: Blobs, name: str, head: BlobHead) -> None:
        super().__init__(head.data)
        self.size = head.size
        self._blobs = blobs
        self._name = name

    def read(self, start: int, length: int) -> bytes:
        end = min(start + length, self.size)
        if end > len(self._data):
            [more] = self._blobs.read_heads([self._name], end)
            if more is not None and more.size == self.size:
                self._data = memoryview(more.data)
        return super().read(start, length)
