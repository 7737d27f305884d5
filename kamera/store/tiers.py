"""Memory, disk and remote as one store: read through, promoted on the way, written back.

get   memory → disk → remote; an object found is kept in the tiers before its own
put   with a disk (or no remote): stored when it returns; the remote gets it in the background
      without a disk: stored when the remote has it, or kept in memory as pending
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kamera.errors import CorruptChunk, KameraError, RemoteUnavailable
from kamera.store.codec import Codec
from kamera.store.disk.tier import DiskTier, trim
from kamera.store.info import ALL, BY_AGE, FlushReport, ObjectInfo, RemoteStats, Selection, Weighed
from kamera.store.keys import check_kind
from kamera.store.memory import MemoryTier
from kamera.store.orders import PutOrder, rank, refuse
from kamera.store.pins import PinBook
from kamera.store.records import Record, detach
from kamera.store.remote import RemoteTier
from kamera.store.remote.uploads import Uploads
from kamera.trust import outranks

logger = logging.getLogger(__name__)

WORKERS = 8
"""Most puts to a remote in progress at once: each has an object's bytes."""
CLOSE_SECONDS = 10.0
"""Seconds that `Tiers.close` waits for objects that the remote does not have yet."""


Lower = DiskTier | RemoteTier
"""A tier below memory. `DiskTier` says what the methods do that both have."""


class Tiers:
    """Objects of one tenant by name, in one to three tiers. Safe to use from several threads.

    Raises as the tiers do, except for the remote: while it is down, slow or refusing, look-ups miss and puts
    wait (`flush`).
    """

    def __init__(
        self,
        codec: Codec,
        tenant: str,
        memory_limit: int,
        disk: DiskTier | None = None,
        remote: RemoteTier | None = None,
    ) -> None:
        self.disk = disk
        self.remote = remote
        self._codec = codec
        self._tenant = tenant
        self._turns: weakref.WeakValueDictionary[str, threading.RLock] = weakref.WeakValueDictionary()
        self._turning = threading.Lock()
        self._uploads = Uploads(self._send)
        self._dropped: dict[str, None] = {}
        # with a disk, memory may evict a pending object: it is read again
        self.memory = MemoryTier(memory_limit, self._uploads if disk is None else ())
        self.pins = remote.pins if remote is not None else self.memory.pins if disk is None else disk.pins
        """With a remote its own, which all its clients honour; a cache directory has the same."""
        if disk is not None and remote is not None:
            self.pins = PinBook(remote.pins.cell, also=disk.pins)
            disk.pins.caches(remote.url)
            trim(disk)
            left = disk.index.notes.unsent(disk.index.weighed(tenant))  # by a killed process, or offline
            for row in sorted(left, key=BY_AGE):
                self._uploads.add(row.key)

    @property
    def lower(self) -> list[Lower]:
        """Those below memory, the nearest first."""
        return [tier for tier in (self.disk, self.remote) if tier is not None]

    def get(self, name: str) -> Record | None:
        """The object ``name`` from the nearest tier that has it."""
        damage = None
        try:
            found = self._local(name)
        except CorruptChunk as error:  # set aside by now; the remote may have a good one
            found, damage = None, error
        if found is None and self.remote is not None:
            with self._alone([name]):
                found = self._fetch(name, self.remote)
        if found is None and damage is not None:
            raise damage
        return found

    def put_many(self, orders: Sequence[PutOrder]) -> list[Record | Exception | None]:
        """Store a copy of each record, and return it; None if a stored one is kept, an error that is its own.

        The names differ, and the orders come by their rank.
        """
        found: dict[str, Record | Exception | None] = {}
        coming: list[PutOrder] = []
        for order in orders:
            try:
                if not order.replace and self._holds(order.name):
                    found[order.name] = None
                else:
                    coming.append(order._replace(record=detach(order.record)))
            except KameraError as error:
                found[order.name] = error
        with self._alone([order.name for order in coming]):
            if self.disk is None:
                self._put_without_disk(coming, found)
            else:
                self._put_on_disk(self.disk, coming, found)
        return [found[order.name] for order in orders]

    def present(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that `get` would find, unread; the remote is asked once, for all not here."""
        found = {name for name in names if self._has_here(name)}
        away = [name for name in names if name not in found]
        try:
            return found | self.remote.present(away) if self.remote is not None and away else found
        except RemoteUnavailable:
            return found

    def info(self, name: str, *, certain: bool = False) -> ObjectInfo | None:
        """The info of the object ``name``. ``certain``: raise `RemoteUnavailable` rather than guess."""
        info = self._info_here(name)
        if info is not None or self.remote is None:
            return info
        try:
            return self.remote.info(name)
        except RemoteUnavailable:
            if certain:
                raise
            return None

    def infos_of(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """The infos of these objects; the remote is asked once. Raises `RemoteUnavailable`."""
        found = {name: self._info_here(name) for name in names}
        away = [name for name, info in found.items() if info is None]
        if self.remote is not None and away:
            found.update(zip(away, self.remote.listing.of(away), strict=True))
        return [found[name] for name in names]

    def infos(self, wanted: Selection = ALL, *, here: bool = False) -> list[ObjectInfo]:
        """Infos of the objects, oldest first; ``here``, and while the remote is down, only of those here."""
        check_kind(wanted.kind)
        remote = None if here else self.remote
        if self.disk is None:
            nearest = self.memory.infos(wanted.chunk_id)
        else:
            nearest = list(self.disk.index.iterate(self._tenant, wanted if remote is None else ALL))
        if remote is None:
            return wanted.of(nearest) if self.disk is None else nearest
        found = {info.key: info for info in nearest}
        try:
            for info in remote.listing.infos():
                found.setdefault(info.key, info)
        except RemoteUnavailable as error:
            logger.debug("only what is here is listed: %s", error)
        return wanted.of(sorted(found.values(), key=BY_AGE))

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects from every tier; raises `RemoteUnavailable`, and then removes none."""
        with self._alone(names):
            if self.remote is not None and names:
                self.remote.delete(names)
            for name in names:
                self._uploads.discard(name)
                if self.disk is not None:
                    self.disk.delete(name)
                self.memory.drop(name)

    def collect(self, objects: Sequence[Weighed]) -> list[bool]:
        """Remove objects that are neither pinned (by any client) nor replaced by now; return which."""
        with self.pins.cell.alone():  # pinning waits, so that an acknowledged pin is seen here
            kept = self.pins.names_to_keep()
            if self.remote is not None:
                self.delete([one.key for one in objects if one.key not in kept])
                return [one.key not in kept for one in objects]
            assert self.disk is not None
            gone = [one.key not in kept and self.disk.delete(one.key, one.stamp) for one in objects]
        for one in objects:
            self.memory.drop(one.key)  # it is read again if it stayed
        return gone

    def remote_stats(self) -> RemoteStats | None:
        """The remote's counters and the number of pending objects; None without a remote."""
        return None if self.remote is None else replace(self.remote.stats(), pending=len(self.pending()))

    def pending(self) -> tuple[str, ...]:
        """Names of the objects that still have to reach the remote."""
        return self._uploads.names()

    def flush(self, timeout: float | None) -> FlushReport:
        """Wait until the remote has everything, at most ``timeout`` seconds (None: for ever)."""
        return FlushReport(self._uploads.flush(timeout), tuple(self._dropped))

    def close(self) -> None:
        """Send the pending objects, unless the remote is down, and release all tiers."""
        unsaved = self._uploads.flush(CLOSE_SECONDS, patient=False)
        self._uploads.close()
        if unsaved and self.disk is None:
            logger.error("closed with %d objects that never reached the remote: they are lost", len(unsaved))
        elif unsaved:
            logger.warning("%d objects will be uploaded when the store is next opened", len(unsaved))
        self.memory.clear()
        if self.remote is not None:
            self.remote.close()
        if self.disk is not None:
            self.disk.close()

    @contextlib.contextmanager
    def _alone(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, no other thread brings or removes these objects."""
        with self._turning:  # each has a lock while one waits for it or holds it
            turns = [self._turns.setdefault(name, threading.RLock()) for name in sorted(set(names))]
        with contextlib.ExitStack() as stack:
            for turn in turns:
                stack.enter_context(turn)
            yield

    def _local(self, name: str) -> Record | None:
        if self.disk is None:
            return self.memory.get(name)
        # asking the file each time costs microseconds, and shows the changes of other processes at once
        stamp = self.disk.stamp(name)
        kept = self.memory.get(name, stamp)
        if stamp is not None:
            self.disk.index.notes.used(name)
        if kept is not None or stamp is None:
            return kept
        found = self.disk.read(name)
        if found is None:
            return None
        self.memory.put(found.record, found.info, found.stamp)
        return found.record

    def _holds(self, name: str) -> bool:
        # the remote is not asked: an object that it lists may still turn out damaged
        return self.memory.info(name) is not None if self.disk is None else self.disk.holds(name)

    def _has_here(self, name: str) -> bool:
        """True if the object is in the directory, or without one in memory."""
        if self.disk is None:
            return self.memory.info(name) is not None
        return self.disk.stamp(name) is not None

    def _info_here(self, name: str) -> ObjectInfo | None:
        if self.disk is None:
            return self.memory.info(name)
        stamp = self.disk.stamp(name)  # a header is read only once
        return None if stamp is None else self.memory.info(name, stamp) or self.disk.info(name)

    def _fetch(self, name: str, remote: RemoteTier) -> Record | None:
        if self._has_here(name):  # fetched while this call waited
            return self._local(name)
        try:
            found = remote.read(name)
        except RemoteUnavailable:
            return None
        if found is None:
            return None
        if self.disk is None:
            self.memory.put(found.record, found.info)
            return found.record
        order = PutOrder(name, found.record, replace=False, file=(found.info, found.data))
        [stamped] = self.disk.write_many([order])
        if isinstance(stamped, Exception):  # such as no room: the object is served all the same
            logger.warning("%s is not cached: %s", name, stamped)
        elif stamped is not None:  # else an intact one stays there
            self.disk.index.notes.note_sent(name, stamped[1])
            trim(self.disk)
            self.memory.put(found.record, *stamped)
        return found.record

    def _put_on_disk(
        self, disk: DiskTier, orders: Sequence[PutOrder], found: dict[str, Record | Exception | None]
    ) -> None:
        coming = [order for order in orders if not refuse(order, found)]
        for order, stamped in zip(coming, disk.write_many(coming), strict=True):
            if stamped is None or isinstance(stamped, Exception):
                found[order.name] = stamped
                continue
            found[order.name] = order.record
            self.memory.put(order.record, *stamped)
            if self.remote is not None:
                self._uploads.add(order.name)

    def _put_without_disk(
        self, orders: Sequence[PutOrder], found: dict[str, Record | Exception | None]
    ) -> None:
        """Put to the remote, several of a rank at once; without a remote, into memory."""
        for _, wave in itertools.groupby(orders, key=lambda order: rank(order.record)):
            coming = [order for order in wave if not refuse(order, found)]
            if self.remote is None or len(coming) < 2:
                done = [self._put_away(order) for order in coming]
            else:  # round trips overlap
                with ThreadPoolExecutor(min(WORKERS, len(coming)), thread_name_prefix="kamera-puts") as pool:
                    done = list(pool.map(self._put_away, coming))
            found.update(zip((order.name for order in coming), done, strict=True))

    def _put_away(self, order: PutOrder) -> Record | Exception | None:
        """Put to the remote, or into memory until it can be sent."""
        name, record = order.name, order.record
        created, there = round(time.time(), 3), self.memory.info(name)
        try:
            info = self._codec.describe(record, created, record.nbytes)
            if there is not None and outranks(there.formed, info.formed):
                return None
            if self.remote is None:
                self.memory.put(record, info)
                return record
            data = self._codec.encode(record, created)
            info = replace(info, bytes=len(data))
            self._dropped.pop(name, None)
            if not self.remote.put(info, data):
                return None
        except RemoteUnavailable as error:
            self._uploads.add(name)  # before it is in memory, so that it is held from the start
            if not self.memory.put(record, info):
                self._uploads.discard(name)
                self._dropped[name] = None
                logger.error("%s is not kept, memory is full of what waits for the remote (%s)", name, error)
        except (KameraError, ValueError) as error:
            return error
        else:
            self._uploads.discard(name)
            self.memory.put(record, info)
        return record

    def _send(self, name: str) -> None:
        """Bring one object to the remote. Raises `RemoteUnavailable`, `CorruptChunk`, `StoreError`."""
        assert self.remote is not None
        with self._alone([name]):
            if self.disk is None:
                kept = self.memory.peek(name)
                if kept is not None:
                    record, info = kept
                    if not self.remote.put(info, self._codec.encode(record, info.created)):
                        self.memory.drop(name)
                return
            found = self.disk.read(name, whole=True)  # verified, so that no damage travels
            if found is None:
                return
            if not self.remote.put(found.info, found.data):
                self.disk.delete(name, found.stamp)  # the next look-up fetches the stronger one
                return
            self.disk.index.notes.note_sent(name, found.stamp)
        trim(self.disk)
