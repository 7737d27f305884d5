"""`StoreAdmin`: verify a store, keep or remove its objects, and move them to another machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kamera.errors import StoreError, UnknownChunk
from kamera.store.admin.copy import Copied, copy
from kamera.store.admin.forget import Forgotten, forget
from kamera.store.admin.gc import collect
from kamera.store.admin.quarantine import Quarantine
from kamera.store.admin.raw import RawObjects
from kamera.store.admin.verify import verify
from kamera.store.info import (
    Census,
    Collected,
    ObjectInfo,
    Progress,
    StoreStats,
    VerifyReport,
    ignore_progress,
)
from kamera.store.keys import KVForm, home_of, is_key, whole_id
from kamera.store.listing import census
from kamera.store.pins import PinBook
from kamera.store.quantities import parse_size

if TYPE_CHECKING:
    from kamera.store.store import ChunkStore
    from kamera.store.tiers import Tiers


class StoreAdmin:
    """Upkeep of a `ChunkStore`, for its tenant unless a method says otherwise; closed with the store.

    ``objects``: all objects as stored, for inspection.

    Errors are those of the store: `StoreClosed`, `ForkedStore`, `StoreReadOnly`, `StoreError` when the
    operating system or the index refuses, `RemoteUnavailable` if the answer needs the remote.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.store = store
        self.objects = RawObjects(store)

    @property
    def quarantine(self) -> Quarantine:
        """The damaged objects that were set aside."""
        return Quarantine(self._tiers)

    # -- contents ------------------------------------------------------------------------------

    def census(self, kind: str | None = None) -> Census:
        """Objects counted by kind, chunk and context, without listing them."""
        return census(self._tiers, self.store.tenant, kind)

    def stats(self) -> StoreStats:
        """Counts and bytes of objects, and the counters of memory and remote."""
        return self.store._stats()

    # -- integrity -----------------------------------------------------------------------------

    def verify(self, *, progress: Progress = ignore_progress) -> VerifyReport:
        """Read every object of the directory, of all tenants; damaged ones go to quarantine.

        Files left by dead writers are removed, and the indices, that of look-back search included, are
        rebuilt from the files. ``progress`` is called with the objects done and their total.
        """
        report = verify(self._tiers, progress)
        self.store._search.rebuild({info.context for info in self.store.ls("canonical", here=True)})
        return report

    def rebuild_index(self) -> int:
        """Rebuild the directory's index from the files; return the number of objects it lists."""
        disk = self._tiers.disk
        return len(self._tiers.memory.infos()) if disk is None else disk.index.correct_all_rows(afresh=True)

    # -- keeping and removing objects ----------------------------------------------------------

    def keys_of(self, targets: str | Iterable[str]) -> list[str]:
        """Keys of objects of this tenant: of ``targets`` each is a key, or a chunk's id for all its objects.

        The beginning of either is enough. Raises `UnknownChunk` for one that names nothing here,
        `AmbiguousId` for the beginning of several.
        """
        names = [targets] if isinstance(targets, str) else list(targets)
        infos = self._tiers.infos_of([name for name in names if is_key(name)])
        own = {i.key for i in infos if i is not None and i.context.tenant == self.store.tenant}
        rows = [] if own.issuperset(names) else self.store.ls()
        ids, keys = [name for row in rows for name in (row.key, row.chunk_id)], list[str]()
        for name in names:
            whole = name if name in own else whole_id(name, ids, "object or chunk")
            keys += [name] if name in own else [r.key for r in rows if whole in (r.key, r.chunk_id)]
        return list(dict.fromkeys(keys))

    def pin(self, targets: str | Iterable[str], ttl: float | str | None = None) -> None:
        """Keep the objects of ``targets`` (`keys_of`) through `gc`; all or none.

        ``ttl``: seconds, or text such as ``"12h"``; None: for good. A chunk's are those that it has now.
        Raises `PinsFull` over the store's cap (`pins`), `UnknownChunk` for what is not stored,
        `RemoteUnavailable`. Pins of a remote are stored beside its objects, and every client's `gc` honours
        them; pins in ``memory://`` are this process's.
        """
        names = self.keys_of(targets)
        infos = self._own_infos(names)
        homes = {
            key: self.store._codec.name(home)
            for key, info in infos.items()
            if (home := home_of(info.kind, info.context, info.chunk_id, info.base))
        }
        self.pins.pin([(key, info.bytes) for key, info in infos.items()], ttl, homes)
        remote, pending_names = self._tiers.remote, self._tiers.pending()  # first: one may arrive meanwhile
        # someone may have collected it before the pin was there
        present_names = self._tiers.stored_names(names) if remote is None else remote.names_with_blob(names)
        lost_names = set(names) - present_names - set(pending_names)
        if lost_names:
            self.pins.unpin(names)
            raise StoreError(f"{self.store.url} has lost {min(lost_names)} meanwhile: nothing was pinned")

    def unpin(self, targets: str | Iterable[str]) -> int:
        """Unpin objects of this tenant (`keys_of`), or objects that are gone; the number that were pinned."""
        pin_names, mine = [pin.name for pin in self.pins.list()], list[str]()
        for target in [targets] if isinstance(targets, str) else targets:
            names = [name for name in pin_names if name.startswith(target)]
            try:
                mine += names if len(names) == 1 else self.keys_of(target)
            except UnknownChunk:
                if not is_key(target):
                    raise  # else its object is gone, with its pin or without
        mine = list(dict.fromkeys(mine))
        if self._tiers.disk is not None and self._tiers.remote is None:  # its pins are of all tenants
            mine = [key for key in mine if self._own_info(key) is not None or self._tiers.info(key) is None]
        return self.pins.unpin(mine)

    @property
    def pins(self) -> PinBook:
        """The store's pins: all tenants' in a directory, this tenant's in a remote, else this process's."""
        return self._tiers.pins

    def delete(self, key: str) -> bool:
        """Remove one object; return True if it existed. Raises `ValueError` if ``key`` is not a key."""
        info = self._own_info(key)
        if info is None:
            return False
        self._tiers.delete([key])
        with contextlib.suppress(StoreError):  # a pin of a removed object keeps nothing
            self.unpin([key])
        self.store._search.forget([key])
        return True

    def gc(
        self,
        max_bytes: int | str | None = None,
        *,
        every_tenant: bool = False,
        quarantine_age: float | None = None,
        dry_run: bool = False,
        progress: Progress = ignore_progress,
    ) -> Collected:
        """Make this tenant's objects take at most ``max_bytes``, also as ``"20GiB"``.

        Pinned objects stay. Of the rest, those that save the least recompute per byte are removed first
        (`eviction`), and any patch whose canonical is gone is removed. ``every_tenant``: all objects of the
        directory, within one budget. ``quarantine_age``: also quarantined copies older than this (seconds),
        of all tenants. ``dry_run``: only report the objects to remove. ``progress`` is called with objects
        removed and to remove. In a remote all objects are weighed, but not by use: uses are not counted
        there. Raises `StoreError` for ``memory://``, which has its own limit, and for a remote's cache
        opened without the remote.
        """
        limit = None if max_bytes is None else parse_size(max_bytes)
        url, remote, disk = self.store.url, self._tiers.remote, self._tiers.disk
        if remote is not None and every_tenant:
            raise StoreError(f"{url} keeps tenants apart: collect for each of them")
        if remote is None and disk is None:
            raise StoreError(f"cannot collect in {url}: bound it by opening it with memory_limit=")
        self._refuse_cache("collect", ", or bound the cache by opening it with disk_limit=")
        tenant = None if every_tenant else self.store.tenant
        report = collect(self._tiers, tenant, limit, quarantine_age, dry_run, progress)
        if not dry_run:
            self.store._search.forget([removal.key for removal in report.removed])
        return report

    def forget(self, chunk_id: str) -> Forgotten:
        """Remove everything made of a chunk (including patches of others formed behind it, and damaged
        copies), check again, and report the remains.

        ``chunk_id`` may be the start of an id if it fits one chunk only; else `UnknownChunk` or `AmbiguousId`
        is raised. A whole id without any object gives a report without ``removed``. Raises
        `RemoteUnavailable` when a remote does not answer; run it again then. Raises `StoreError` for a
        remote's cache opened without the remote, for which it cannot answer.
        """
        self._refuse_cache("forget")
        store = self.store
        return forget(self._tiers, store._search, store._codec, store.tenant, chunk_id)

    # -- copies ---------------------------------------------------------------------------------

    def copy(
        self,
        target: ChunkStore | str | os.PathLike[str],
        chunks: Sequence[str] | None = None,
        *,
        kv: KVForm | None = None,
        progress: Progress = ignore_progress,
    ) -> Copied:
        """Copy objects into ``target`` as its tenant's, or into a plain store at that url, made if missing.

        Every object is verified first, and none replaces another; the report lists those refused. ``chunks``
        (ids): only those, with the patches whose antecedents are all among them. ``kv`` (``"int8"``,
        ``"int4"``): canonicals in codes, without patches of another form; what is in other codes is refused
        by name: codes of codes lose twice.
        ``progress`` is called with the objects done and their total. Raises `UnknownChunk` for a chunk that
        is not stored, `ValueError` for a form without codes, and for a copy into itself.
        """
        return copy(self.store, target, chunks, kv, progress)

    @property
    def _tiers(self) -> Tiers:
        return self.store._tiers

    def _own_info(self, key: str) -> ObjectInfo | None:
        """The description of ``key`` if it is this tenant's. Raises `ValueError` if it is not a key."""
        _check_key(key)
        info = self._tiers.info(key, certain=True)
        return None if info is None or info.context.tenant != self.store.tenant else info

    def _own_infos(self, keys: list[str]) -> dict[str, ObjectInfo]:
        """The descriptions of ``keys``. Raises `StoreError` unless all of them are this tenant's objects."""
        for key in keys:
            _check_key(key)
        infos = {}
        for key, info in zip(keys, self._tiers.infos_of(keys), strict=True):
            if info is None or info.context.tenant != self.store.tenant:
                raise StoreError(f"{self.store.url} has no object {key!r} of this tenant: nothing was pinned")
            infos[key] = info
        return infos

    def _refuse_cache(self, verb: str, else_: str = "") -> None:
        """Raise `StoreError` if this is a remote's cache directory, opened without the remote."""
        disk = self._tiers.disk
        remote_url = None if disk is None or self._tiers.remote else disk.pins.remote
        if disk is not None and remote_url is not None:
            raise StoreError(
                f"{disk.root} is the cache of {remote_url}: open that with this as cache= (--cache) to "
                f"{verb}{else_}"
            )


def _check_key(key: str) -> None:
    if not is_key(key):
        raise ValueError(f"{key!r} is no key: 64 lower-case hex digits")
