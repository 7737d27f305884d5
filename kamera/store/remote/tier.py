"""Objects in a remote: read by name, verified before any use."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kamera.errors import CorruptChunk, ForeignKey, RemoteUnavailable, StoreVersionError, WrongKey
from kamera.store.codec import UNREADABLE, Codec
from kamera.store.info import ObjectInfo, Quarantined, RemoteStats
from kamera.store.opened import Fetched
from kamera.store.pins import PinBook
from kamera.store.remote.blobs import OBJECTS, QUARANTINE, BlobCell, Blobs
from kamera.store.remote.guard import COOLDOWN, Breaker, Guard
from kamera.store.remote.listing import Listing
from kamera.store.sources import BytesSource
from kamera.trust import GUARANTEES, outranks

logger = logging.getLogger(__name__)


class RemoteTier:
    """One tenant's objects in a remote; see `DiskTier`. Safe to use from several threads and machines.

    Every method raises `RemoteUnavailable` when the remote does not answer or refuses: at once, while it is
    known to be down.
    """

    def __init__(self, blobs: Blobs, codec: Codec, tenant: str, cooldown: float = COOLDOWN) -> None:
        self.url = blobs.url
        self._blobs = Guard(blobs, Breaker("reads", cooldown), Breaker("writes", cooldown))
        self.pins = PinBook(BlobCell(self._blobs))
        self._codec = codec
        self._tenant = tenant
        self.listing = Listing(self._blobs, codec, tenant)
        """Its objects by their headers."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def read(self, name: str) -> Fetched | None:
        """See `DiskTier`. Raises `ForeignKey` too, for a key that is no blob: then it stays where it is."""
        try:
            data = self._blobs.get(OBJECTS + name)
        except ForeignKey:
            self._count("refused")
            raise
        if data is None:
            self._count("misses")
            return None
        try:
            open_object = self._codec.open(BytesSource(data), name, self._source(name))
            record = open_object.read()
        except CorruptChunk as error:
            self._count("refused")
            raise CorruptChunk(f"{error}; {self._set_aside(name, data)}") from error
        except (StoreVersionError, WrongKey):
            self._count("refused")
            raise
        self._count("hits")
        return Fetched(record, open_object.head.info, data=data)

    def load(self, name: str) -> bytes | None:
        return self._blobs.get(OBJECTS + name)

    def reach(self) -> None:
        """Make one request, to check that the remote answers."""
        self._blobs.read_heads([OBJECTS], 1)

    def names_with_blob(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that have a blob, unverified."""
        heads = self._blobs.read_heads([OBJECTS + name for name in names], 1)
        return {name for name, head in zip(names, heads, strict=True) if head is not None}

    def info(self, name: str) -> ObjectInfo | None:
        """The description of ``name`` by its header; None for a foreign key, too. Raises as `read`."""
        try:
            info = self.listing.read_info(OBJECTS + name)
            return None if info is None or info.context.tenant != self._tenant else info
        except UNREADABLE:
            with contextlib.suppress(ForeignKey):
                self.read(name)
            return None

    def names(self) -> list[str]:
        return self.listing.names()

    def strangers(self) -> list[str]:
        """One line for each key in the place of an object that is none."""
        return [f"{self._source(n)}: no object's name: move it away" for n in self.listing.strangers()]

    def put(self, info: ObjectInfo, data: bytes) -> bool:
        """Store an object, whose file is ``data``; False if the one there was formed behind stronger KV.

        Of two machines that put at the same instant, the later one may not see the other's.
        """
        if info.formed is not None and outranks(GUARANTEES[0], info.formed):
            with contextlib.suppress(*UNREADABLE):
                stored_info = self.info(info.key)
                if stored_info is not None and outranks(stored_info.formed, info.formed):
                    return False
        self._blobs.put(OBJECTS + info.key, data)
        self._count("stored")
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; absent ones are ignored."""
        self._blobs.delete([OBJECTS + name for name in names])

    def copies(self) -> list[Quarantined]:
        blobs = sorted(b for b in self._blobs.marks(QUARANTINE) if Quarantined.of(b[len(QUARANTINE) :], 0))
        heads = self._blobs.read_heads(blobs, 1) if blobs else []
        named_heads = zip((blob[len(QUARANTINE) :] for blob in blobs), heads, strict=True)
        copies = (Quarantined.of(file, head.size) for file, head in named_heads if head is not None)
        return [copy for copy in copies if copy is not None]

    def copy_info(self, file: str) -> ObjectInfo | None:
        with contextlib.suppress(*UNREADABLE):
            return self.listing.read_info(QUARANTINE + file)
        return None

    def delete_copy(self, file: str) -> None:
        self._blobs.delete([QUARANTINE + file])

    def stats(self) -> RemoteStats:
        """Counters since it was opened, and its state."""
        reads, writes = self._blobs.reads, self._blobs.writes
        with self._lock:
            counts = Counter(self._counts)
        return RemoteStats(
            url=self.url,
            reads=reads.state,
            writes=writes.state,
            **{what: counts[what] for what in ("hits", "misses", "refused", "stored")},
            **{what: reads.counts[what] + writes.counts[what] for what in ("calls", "failures", "skipped")},
            last_error=reads.last_error or writes.last_error,
        )

    def close(self) -> None:
        """Close the connections."""
        self._blobs.close()

    def _set_aside(self, name: str, data: bytes) -> str:
        place = f"{QUARANTINE}{name}.{time.time_ns()}"
        try:
            self._blobs.put(place, data)
            if not self._blobs.replace(OBJECTS + name, None, data):
                self._blobs.delete([place])
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
