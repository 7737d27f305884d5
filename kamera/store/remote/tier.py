"""Objects in a remote: read by name, verified before anything of them is used."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, cast

from kamera.errors import CorruptChunk, RemoteUnavailable, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.info import ObjectInfo, RemoteStats, VerifyReport
from kamera.store.records import CanonicalRecord, PatchRecord
from kamera.store.remote.blobs import OBJECTS, QUARANTINE, Blobs, Head, object_names
from kamera.store.remote.guard import Breaker, Guard

logger = logging.getLogger(__name__)

_HEAD = 32 * 1024  # bytes; the header of most objects is within
_BATCH = 256  # headers listed at a time


class Fetched(NamedTuple):
    """An object, what it is, and the very bytes it was read from."""

    record: CanonicalRecord | PatchRecord
    info: ObjectInfo
    data: bytes


class RemoteTier:
    """One tenant's objects in a remote. Safe to use from several threads and machines.

    Every name it is given is one of its ``codec``. Every method raises `RemoteUnavailable` when the
    remote does not answer or refuses: at once, while it is known to be down.
    """

    def __init__(
        self, blobs: Blobs, codec: Codec, tenant: str, breaker: Callable[[], Breaker] = Breaker
    ) -> None:
        self.url = blobs.url
        self._blobs = Guard(blobs, breaker)
        self._codec = codec
        self._tenant = tenant
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def get(self, name: str) -> Fetched | None:
        """The object ``name``, verified to the last byte; None if there is none.

        Anything else that lies there is set aside under ``quarantine/``, and `CorruptChunk` raised.
        `StoreVersionError` and `WrongKey` as `Codec.decode`: it stays where it is.
        """
        data = self._blobs.get(OBJECTS + name)
        if data is None:
            self._count("misses")
            return None
        try:
            record = self._codec.decode(data, name, self._source(name))
            info = self._codec.read_info(io.BytesIO(data), len(data), name, self._source(name))
        except CorruptChunk as error:
            self._count("refused")
            raise CorruptChunk(f"{error}; {self._set_aside(name, data)}") from error
        except (StoreVersionError, WrongKey):
            self._count("refused")
            raise
        self._count("hits")
        return Fetched(record, info, data)

    def has(self, name: str) -> bool:
        """Whether there is a blob called ``name``; it is not verified."""
        return self._blobs.heads([OBJECTS + name], 1)[0] is not None

    def info(self, name: str) -> ObjectInfo | None:
        """What the header of ``name`` says, unverified; None if there is none, or none that can be read."""
        return self._info(name, self._blobs.heads([OBJECTS + name], _HEAD)[0])

    def infos(self) -> Iterator[ObjectInfo]:
        """What the headers of all objects say, by name, unverified; unreadable ones are left out."""
        names = object_names(self._blobs.names())
        for i in range(0, len(names), _BATCH):
            batch = names[i : i + _BATCH]
            heads = self._blobs.heads([OBJECTS + name for name in batch], _HEAD)
            for name, head in zip(batch, heads, strict=True):
                info = self._info(name, head)
                if info is not None and info.context.tenant == self._tenant:
                    yield info

    def names(self) -> list[str]:
        """All objects."""
        return object_names(self._blobs.names())

    def put(self, name: str, data: bytes) -> None:
        """Store ``data``, which `Codec.encode` made, in place of the object ``name``."""
        self._blobs.put(OBJECTS + name, data)
        self._count("stored")

    def delete(self, name: str) -> bool:
        """Remove the object ``name``; whether there was one."""
        return self._blobs.delete(OBJECTS + name)

    def quarantined(self) -> list[str]:
        """Names (object, dot, nanoseconds since 1970) of what was set aside."""
        return sorted(name[len(QUARANTINE) :] for name in self._blobs.names() if name.startswith(QUARANTINE))

    def quarantined_info(self, quarantined: str) -> ObjectInfo | None:
        """What the header of one of `quarantined` says; None if it cannot be read."""
        blob = QUARANTINE + quarantined
        return self._info(quarantined.partition(".")[0], self._blobs.heads([blob], _HEAD)[0], blob)

    def purge(self, quarantined: str) -> bool:
        """Remove one of `quarantined` for good; whether it was there."""
        return self._blobs.delete(QUARANTINE + quarantined)

    def verify(self) -> VerifyReport:
        """Read every object once; damaged ones go to quarantine."""
        ok = 0
        quarantined: list[str] = []
        refused: list[str] = []
        for name in object_names(self._blobs.names()):
            try:
                ok += self.get(name) is not None
            except CorruptChunk as error:
                quarantined.append(str(error))
            except (StoreVersionError, WrongKey) as error:
                refused.append(str(error))
        return VerifyReport(ok, tuple(quarantined), tuple(refused))

    def stats(self) -> RemoteStats:
        """Counters since it was opened, and whether it is up."""
        reads, writes = self._blobs.reads, self._blobs.writes
        with self._lock:
            counts = Counter(self._counts)
        return RemoteStats(
            url=self.url,
            reads=reads.state,
            writes=writes.state,
            hits=counts["hits"],
            misses=counts["misses"],
            refused=counts["refused"],
            stored=counts["stored"],
            calls=reads.counts["calls"] + writes.counts["calls"],
            failures=reads.counts["failures"] + writes.counts["failures"],
            skipped=reads.counts["skipped"] + writes.counts["skipped"],
            last_error=reads.last_error or writes.last_error,
        )

    def close(self) -> None:
        """Let go of connections."""
        self._blobs.close()

    def _info(self, name: str, head: Head | None, blob: str | None = None) -> ObjectInfo | None:
        if head is None:
            return None
        file = cast(BinaryIO, _Front(self._blobs, blob or OBJECTS + name, head))
        try:
            return self._codec.read_info(file, head.size, name, self._source(name))
        except (CorruptChunk, StoreVersionError, WrongKey) as error:
            logger.warning("not listed: %s", error)  # reading it by name tells more, and sets it aside
            return None

    def _set_aside(self, name: str, data: bytes) -> str:
        place = f"{QUARANTINE}{name}.{time.time_ns()}"
        try:
            if not self._blobs.set_aside(OBJECTS + name, data, place):
                return "it was replaced meanwhile"
        except RemoteUnavailable as error:
            return f"not set aside: {error}"
        logger.warning("damaged object %s of %s moved to %s", name, self.url, place)
        return f"moved to {place}"

    def _source(self, name: str) -> str:
        return f"{self.url} {OBJECTS}{name}"

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


class _Front(io.BytesIO):
    """A blob as a file of which only the front is read, and more only when that was too little."""

    def __init__(self, blobs: Guard, name: str, head: Head) -> None:
        super().__init__(head.data)
        self._fetch = lambda length: blobs.heads([name], length)[0]
        self._size = head.size

    def read(self, size: int | None = -1, /) -> bytes:
        start = self.tell()
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        if end > len(self.getbuffer()):
            more = self._fetch(end)
            if more is not None and more.size == self._size:
                self.seek(0)
                self.write(more.data)
                self.seek(start)
        return super().read(size)
