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
from kamera.store.disk.tier import DiskTier, evict_over_limit
from kamera.store.info import ALL, BY_AGE, FlushReport, ObjectInfo, RemoteStats, Selection, Weighed
from kamera.store.keys import check_kind
from kamera.store.memory import MemoryTier
from kamera.store.orders import PutOrder, put_rank, refuse_dependent
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
        self._dropped_names: dict[str, None] = {}
        # with a disk, memory may evict a pending object: it is read again
        self.memory = MemoryTier(memory_limit, self._uploads if disk is None else ())
        self.pins = remote.pins if remote is not None else self.memory.pins if disk is None else disk.pins
        """With a remote its own, which all its clients honour; a cache directory has the same."""
        if disk is not None and remote is not None:
            self.pins = PinBook(remote.pins.cell, also=disk.pins)
            disk.pins.note_cached_remote(remote.url)
            evict_over_limit(disk)
            rows = disk.index.notes.unsent_rows(disk.index.weigh(tenant))  # by a killed process, or offline
            for row in sorted(rows, key=BY_AGE):
                self._uploads.add(row.key)

    @property
    def tiers_below_memory(self) -> list[Lower]:
        """Those below memory, the nearest first."""
        return [tier for tier in (self.disk, self.remote) if tier is not None]

    def get(self, name: str) -> Record | None:
        """The object ``name`` from the nearest tier that has it."""
        damage = None
        try:
            record = self._local(name)
        except CorruptChunk as error:  # set aside by now; the remote may have a good one
            record, damage = None, error
        if record is None and self.remote is not None:
            with self._alone([name]):
                record = self._fetch(name, self.remote)
        if record is None and damage is not None:
            raise damage
        return record

    def put_many(self, orders: Sequence[PutOrder]) -> list[Record | Exception | None]:
        """Store a copy of each record, and return it; None if a stored one is kept, an error that is its own.

        The names differ, and the orders come by their rank.
        """
        results: dict[str, Record | Exception | None] = {}
        batch: list[PutOrder] = []
        for order in orders:
            try:
                if not order.replace and self._holds(order.name):
                    results[order.name] = None
                else:
                    batch.append(order._replace(record=detach(order.record)))
            except KameraError as error:
                results[order.name] = error
        with self._alone([order.name for order in batch]):
            if self.disk is None:
                self._put_without_disk(batch, results)
            else:
                self._put_on_disk(self.disk, batch, results)
        return [results[order.name] for order in orders]

    def stored_names(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that `get` would find, unread; the remote is asked once, for all not here."""
        hits = {name for name in names if self._has_here(name)}
        misses = [name for name in names if name not in hits]
        try:
            return hits | self.remote.names_with_blob(misses) if self.remote is not None and misses else hits
        except RemoteUnavailable:
            return hits

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
        infos = {name: self._info_here(name) for name in names}
        misses = [name for name, info in infos.items() if info is None]
        if self.remote is not None and misses:
            infos.update(zip(misses, self.remote.listing.infos_of(misses), strict=True))
        return [infos[name] for name in names]

    def infos(self, selection: Selection = ALL, *, here: bool = False) -> list[ObjectInfo]:
        """Infos of the objects, oldest first; ``here``, and while the remote is down, only of those here."""
        check_kind(selection.kind)
        remote = None if here else self.remote
        if self.disk is None:
            near_infos = self.memory.infos(selection.chunk_id)
        else:
            near_infos = list(self.disk.index.iterate(self._tenant, selection if remote is None else ALL))
        if remote is None:
            return selection.select(near_infos) if self.disk is None else near_infos
        infos = {info.key: info for info in near_infos}
        try:
            for info in remote.listing.infos():
                infos.setdefault(info.key, info)
        except RemoteUnavailable as error:
            logger.debug("only what is here is listed: %s", error)
        return selection.select(sorted(infos.values(), key=BY_AGE))

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

    def remove_unpinned(self, objects: Sequence[Weighed]) -> list[bool]:
        """Remove objects that are neither pinned (by any client) nor replaced by now; return which."""
        with self.pins.cell.exclude_others():  # pinning waits, so that an acknowledged pin is seen here
            pin_names = self.pins.names_to_keep()
            if self.remote is not None:
                self.delete([one.key for one in objects if one.key not in pin_names])
                return [one.key not in pin_names for one in objects]
            assert self.disk is not None
            outcomes = [one.key not in pin_names and self.disk.delete(one.key, one.stamp) for one in objects]
        for one in objects:
            self.memory.drop(one.key)  # it is read again if it stayed
        return outcomes

    def remote_stats(self) -> RemoteStats | None:
        """The remote's counters and the number of pending objects; None without a remote."""
        return None if self.remote is None else replace(self.remote.stats(), pending=len(self.pending()))

    def pending(self) -> tuple[str, ...]:
        """Names of the objects that still have to reach the remote."""
        return self._uploads.names()

    def flush(self, timeout: float | None) -> FlushReport:
        """Wait until the remote has everything, at most ``timeout`` seconds (None: for ever)."""
        return FlushReport(self._uploads.flush(timeout), tuple(self._dropped_names))

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
        record = self.memory.get(name, stamp)
        if stamp is not None:
            self.disk.index.notes.count_use(name)
        if record is not None or stamp is None:
            return record
        disk_copy = self.disk.read(name)
        if disk_copy is None:
            return None
        self.memory.put(disk_copy.record, disk_copy.info, disk_copy.stamp)
        return disk_copy.record

    def _holds(self, name: str) -> bool:
        # the remote is not asked: an object that it lists may still turn out damaged
        return self.memory.info(name) is not None if self.disk is None else self.disk.is_stored_intact(name)

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
            remote_copy = remote.read(name)
        except RemoteUnavailable:
            return None
        if remote_copy is None:
            return None
        if self.disk is None:
            self.memory.put(remote_copy.record, remote_copy.info)
            return remote_copy.record
        order = PutOrder(name, remote_copy.record, replace=False, file=(remote_copy.info, remote_copy.data))
        [result] = self.disk.write_many([order])
        if isinstance(result, Exception):  # such as no room: the object is served all the same
            logger.warning("%s is not cached: %s", name, result)
        elif result is not None:  # else an intact one stays there
            self.disk.index.notes.note_sent(name, result[1])
            evict_over_limit(self.disk)
            self.memory.put(remote_copy.record, *result)
        return remote_copy.record

    def _put_on_disk(
        self, disk: DiskTier, orders: Sequence[PutOrder], results: dict[str, Record | Exception | None]
    ) -> None:
        batch = [order for order in orders if not refuse_dependent(order, results)]
        for order, result in zip(batch, disk.write_many(batch), strict=True):
            if result is None or isinstance(result, Exception):
                results[order.name] = result
                continue
            results[order.name] = order.record
            self.memory.put(order.record, *result)
            if self.remote is not None:
                self._uploads.add(order.name)

    def _put_without_disk(
        self, orders: Sequence[PutOrder], results: dict[str, Record | Exception | None]
    ) -> None:
        """Put to the remote, several of a rank at once; without a remote, into memory."""
        for _, wave in itertools.groupby(orders, key=lambda order: put_rank(order.record)):
            batch = [order for order in wave if not refuse_dependent(order, results)]
            if self.remote is None or len(batch) < 2:
                wave_results = [self._put_away(order) for order in batch]
            else:  # round trips overlap
                with ThreadPoolExecutor(min(WORKERS, len(batch)), thread_name_prefix="kamera-puts") as pool:
                    wave_results = list(pool.map(self._put_away, batch))
            results.update(zip((order.name for order in batch), wave_results, strict=True))

    def _put_away(self, order: PutOrder) -> Record | Exception | None:
        """Put to the remote, or into memory until it can be sent."""
        name, record = order.name, order.record
        created, stored_info = round(time.time(), 3), self.memory.info(name)
        try:
            info = self._codec.describe(record, created, record.nbytes)
            if stored_info is not None and outranks(stored_info.formed, info.formed):
                return None
            if self.remote is None:
                self.memory.put(record, info)
                return record
            data = self._codec.encode(record, created)
            info = replace(info, bytes=len(data))
            self._dropped_names.pop(name, None)
            if not self.remote.put(info, data):
                return None
        except RemoteUnavailable as error:
            self._uploads.add(name)  # before it is in memory, so that it is held from the start
            if not self.memory.put(record, info):
                self._uploads.discard(name)
                self._dropped_names[name] = None
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
                record_and_info = self.memory.peek(name)
                if record_and_info is not None:
                    record, info = record_and_info
                    if not self.remote.put(info, self._codec.encode(record, info.created)):
                        self.memory.drop(name)
                return
            disk_copy = self.disk.read(name, whole=True)  # verified, so that no damage travels
            if disk_copy is None:
                return
            if not self.remote.put(disk_copy.info, disk_copy.data):
                self.disk.delete(name, disk_copy.stamp)  # the next look-up fetches the stronger one
                return
            self.disk.index.notes.note_sent(name, disk_copy.stamp)
        evict_over_limit(self.disk)
