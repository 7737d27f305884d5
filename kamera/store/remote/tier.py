"""Objects in a remote: read by name, verified before any use."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple, cast

from kamera.errors import CorruptChunk, ForeignKey, RemoteUnavailable, StoreVersionError, WrongKey
from kamera.ops import GUARANTEES, outranks
from kamera.store.codec import Codec
from kamera.store.info import ObjectInfo, Quarantined, RemoteStats, VerifyReport
from kamera.store.keys import is_key
from kamera.store.pins import PinBook
from kamera.store.records import Record
from kamera.store.remote.blobs import OBJECTS, QUARANTINE, Blobs, Head
from kamera.store.remote.guard import Breaker, Guard
from kamera.store.remote.listing import Listing
from kamera.store.remote.pins import RemotePlace

logger = logging.getLogger(__name__)

_HEAD = 32 * 1024  # bytes; holds the header of most objects
_COPY = re.compile(r"([0-9a-f]{64})\.(\d{1,20})")


class Fetched(NamedTuple):
    """An object, its description, and the bytes it was read from."""

    record: Record
    info: ObjectInfo
    data: bytes


class RemoteTier:
    """One tenant's objects in a remote. Safe to use from several threads and machines.

    Every name passed in is one of its ``codec``. Every method raises `RemoteUnavailable` when the remote
    does not answer or refuses: at once, while it is known to be down.
    """

    def __init__(
        self, blobs: Blobs, codec: Codec, tenant: str, breaker: Callable[[], Breaker] = Breaker
    ) -> None:
        self.url = blobs.url
        self._blobs = Guard(blobs, breaker)
        self.pins = PinBook(RemotePlace(self._blobs))
        self._listing = self._lister()
        self._codec = codec
        self._tenant = tenant
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._unreadable: set[str] = set()

    def get(self, name: str) -> Fetched | None:
        """The object ``name``, verified to the last byte; None if there is none.

        Any other blob there is set aside under ``quarantine/``, and `CorruptChunk` raised. Raises
        `StoreVersionError` and `WrongKey` as `Codec.decode`, and `ForeignKey`: then it stays where it is.
        """
        try:
            data = self._blobs.get(OBJECTS + name)
        except ForeignKey:
            self._count("refused")
            raise
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

    def raw(self, name: str) -> bytes | None:
        """The bytes under ``name``, unverified; not counted as a use."""
        return self._blobs.get(OBJECTS + name)

    def reach(self) -> None:
        """Make one request, to check that the remote answers."""
        self._blobs.present([OBJECTS])

    def has(self, name: str) -> bool:
        """True if there is a blob ``name``; it is not verified."""
        return bool(self.present([name]))

    def present(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that have a blob, unverified."""
        found = self._blobs.present([OBJECTS + name for name in names])
        return {name for name, is_there in zip(names, found, strict=True) if is_there}

    def info(self, name: str) -> ObjectInfo | None:
        """The description of ``name`` from its header, its tensors unverified; None if there is none.

        Raises as `get` for a blob that is not this object: it is set aside. A key of another type counts as
        none.
        """
        found = self.infos_of([name])[0]
        if found is None and name in self._unreadable:
            self._unreadable.discard(name)
            with contextlib.suppress(ForeignKey):
                self.get(name)
        return found

    def infos_of(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """`info` of many."""
        return self._listing.of(list(names))

    def infos(self, *, afresh: bool = False) -> Iterator[ObjectInfo]:
        """Descriptions of all objects from their headers, by name, unverified; unreadable ones are left out.

        A header is read once, and again when its blob has changed; ``afresh``: read all now.
        """
        yield from (self._lister() if afresh else self._listing)()

    def names(self) -> list[str]:
        """Names of all objects."""
        return self._listing.names()

    def put(self, name: str, data: bytes) -> bool:
        """Store ``data``, which `Codec.encode` made, in place of the object ``name``.

        False, and nothing is stored, if that is a patch formed behind stronger KV. Of two machines that put
        at the same instant, the later one may not see the other's.
        """
        mine = self._codec.read_info(io.BytesIO(data), len(data), name, self._source(name))
        if mine.formed is not None and outranks(GUARANTEES[0], mine.formed):
            with contextlib.suppress(CorruptChunk, StoreVersionError, WrongKey):
                there = self.info(name)
                if there is not None and outranks(there.formed, mine.formed):
                    return False
        self._blobs.put(OBJECTS + name, data)
        self._count("stored")
        return True

    def exchange(self, name: str, old: bytes, new: bytes) -> bool:
        """Put ``new`` in place of the object ``name`` if that still is ``old``; return True if it was.

        Raises `StoreError` if the remote cannot do that in one step.
        """
        return self._blobs.exchange(OBJECTS + name, old, new)

    def create(self, name: str, data: bytes) -> bool:
        """Store ``data`` unless ``name`` exists; return True if it was stored."""
        return self._blobs.create(OBJECTS + name, data)

    def delete(self, name: str) -> bool:
        """Remove the object ``name``; return True if it existed."""
        return self._blobs.delete(OBJECTS + name)

    def discard(self, names: Sequence[str]) -> None:
        """Remove objects; absent ones are ignored."""
        self._blobs.discard([OBJECTS + name for name in names])

    def copies(self) -> list[str]:
        """Names (object, dot, nanoseconds since 1970) of the blobs set aside."""
        found = (name[len(QUARANTINE) :] for name in self._blobs.listed(QUARANTINE))
        return sorted(name for name in found if _COPY.fullmatch(name))

    def quarantined(self) -> list[Quarantined]:
        """`copies`, with their sizes; the reasons for setting them aside are not stored."""
        copies = self.copies()
        heads = self._blobs.heads([QUARANTINE + copy for copy in copies], 1) if copies else []
        found = []
        for copy, head in zip(copies, heads, strict=True):
            name, _, nanoseconds = copy.partition(".")
            if head is not None:
                found.append(Quarantined(copy, name, head.size, int(nanoseconds) / 1e9, "not recorded"))
        return found

    def copy_info(self, copy: str) -> ObjectInfo | None:
        """The description of one of `copies` from its header; None if it cannot be read."""
        blob = QUARANTINE + copy
        return self._info(copy.partition(".")[0], self._blobs.heads([blob], _HEAD)[0], blob)

    def read_copy(self, copy: str) -> bytes | None:
        """The bytes of one of `copies`, unverified."""
        return self._blobs.get(QUARANTINE + copy)

    def purge(self, copy: str) -> bool:
        """Remove one of `copies` for good; return True if it existed."""
        return self._blobs.delete(QUARANTINE + copy)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> VerifyReport:
        """Read every object once; damaged ones go to quarantine, and foreign keys are named.

        ``progress`` is called with the objects done and their total.
        """
        ok = 0
        quarantined: list[str] = []
        refused = [
            f"{self._source(name)}: no object's name: move it away" for name in self._listing.strangers()
        ]
        names = self.names()
        for done, name in enumerate(names, 1):
            try:
                ok += self.get(name) is not None
            except (StoreVersionError, WrongKey, ForeignKey) as error:
                refused.append(str(error))
            except CorruptChunk as error:
                quarantined.append(str(error))
            progress(done, len(names))
        return VerifyReport(ok, tuple(quarantined), tuple(refused))

    def stats(self) -> RemoteStats:
        """Counters since it was opened, and its state."""
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
        """Close the connections."""
        self._blobs.close()

    def _lister(self) -> Listing[ObjectInfo]:
        return Listing(self._blobs, OBJECTS, is_key, _HEAD, self._own_info)

    def _own_info(self, name: str, head: Head) -> ObjectInfo | None:
        info = self._info(name, head)
        return None if info is None or info.context.tenant != self._tenant else info

    def _info(self, name: str, head: Head | None, blob: str | None = None) -> ObjectInfo | None:
        if head is None:
            return None
        file = cast(BinaryIO, _Front(self._blobs, blob or OBJECTS + name, head))
        try:
            return self._codec.read_info(file, head.size, name, self._source(name))
        except (CorruptChunk, StoreVersionError, WrongKey) as error:
            logger.warning("not listed: %s", error)  # reading it by name reports the fault, and sets it aside
            self._unreadable.add(name)
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
    """A blob as a file: its front, and more only if that is too short."""

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
