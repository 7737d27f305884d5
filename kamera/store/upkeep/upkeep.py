"""Upkeep of a store: what is in it, whether it is sound, what stays and what goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kamera.errors import StoreError
from kamera.store.codec import Codec
from kamera.store.disk.database import exists
from kamera.store.disk.tier import DiskTier
from kamera.store.info import (
    Census,
    Collected,
    ObjectInfo,
    Quarantined,
    StoreStats,
    VerifyReport,
)
from kamera.store.keys import (
    KINDS,
    PATCH_KINDS,
    Context,
    is_key,
)
from kamera.store.memory import MemoryTier, parse_size
from kamera.store.remote.ledger import LEDGER
from kamera.store.seal.rotate import Rotated, rotate
from kamera.store.search.lookback import Search
from kamera.store.tiers import Tiers
from kamera.store.upkeep.bundle import Progress
from kamera.store.upkeep.forget import Forgotten, forget
from kamera.store.upkeep.gc import clean
from kamera.store.upkeep.pins import PINS, Pins


class Upkeep:
    """The operators' half of a `ChunkStore`."""

    url: str
    tenant: str
    _codec: Codec
    _tiers: Tiers
    _disk: DiskTier | None
    _memory: MemoryTier
    _search: Search

    def census(self, kind: str | None = None) -> Census:
        """This tenant's objects counted by kind, chunk and context, without listing them."""
        check_kind(kind)
        if self._disk is not None and self._tiers.remote is None:
            return self._disk.index.census(self.tenant, kind)
        return Census.of(self._rows(kind=kind), KINDS if kind is None else (kind,))

    def stats(self) -> StoreStats:
        """Counts and bytes of this tenant's objects, and the memory tier's counters."""
        disk = self._disk
        here = self._memory.infos() if disk is None else []
        kinds = Census.of(here, KINDS).kinds if disk is None else disk.index.kinds(self.tenant)
        return StoreStats(
            url=self.url,
            canonicals=kinds["canonical"].objects,
            patches=sum(kinds[kind].objects for kind in PATCH_KINDS),
            bytes=sum(held.bytes for held in kinds.values()),
            memory=self._memory.stats(),
            remote=self._tiers.remote_stats(),
        )

    def pin(self, keys: Iterable[str], ttl: float | None = None) -> None:
        """Keep objects of this tenant through `gc`, for ``ttl`` seconds or for good; all or none.

        Raises `PinsFull` over the store's cap (`Pins.set_cap`), `StoreError` for an object that is not
        stored. Without a directory they are kept in this process's memory, one after the other.
        """
        found = {key: self._own_info(key) for key in keys}
        missing = [key for key, info in found.items() if info is None]
        if missing:
            raise StoreError(f"{self.url} has no object {missing[0]!r} of this tenant: nothing was pinned")
        if self._disk is None:
            for key in found:
                if not self._memory.pin(key, ttl):
                    raise StoreError(f"{key} is not in memory: get it first")
            return
        self.pins.pin([(key, info.bytes) for key, info in found.items() if info is not None], ttl)

    def unpin(self, keys: Iterable[str]) -> int:
        """Let objects of this tenant, or that are gone, leave again; how many of them were pinned."""
        mine = [key for key in keys if self._own_info(key) is not None or self._tiers.info(key) is None]
        if self._disk is None:
            return sum(self._memory.unpin(key) for key in mine)
        return self.pins.unpin(mine)

    @property
    def pins(self) -> Pins:
        """The directory's pins, of all tenants. Raises `StoreError` for ``memory://``."""
        return Pins(self._directory("pin").root / PINS)

    def gc(
        self,
        max_bytes: int | str | None = None,
        *,
        every_tenant: bool = False,
        quarantine_age: float | None = None,
        dry_run: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Collected:
        """Make this tenant's objects take at most ``max_bytes``, also as ``"20GiB"``.

        What is pinned stays; of the rest goes what saves the least recompute per byte (`upkeep.gc`),
        and always a patch whose canonical is gone. ``every_tenant``: all objects of the directory, within
        one budget. ``quarantine_age``: also copies in quarantine that are older (seconds), whoever's.
        ``dry_run``: only say what would go. ``progress`` is called with objects gone and to go. Raises
        `StoreError` for ``memory://`` and remotes, which have limits of their own.
        """
        disk = self._directory("collect")
        if self._tiers.remote is not None or exists(disk.root / LEDGER):
            raise StoreError(f"{disk.root} is the cache of a remote: bound it by opening it with disk_limit=")
        limit = None if max_bytes is None else parse_size(max_bytes)
        report = clean(disk, None if every_tenant else self.tenant, limit, quarantine_age, dry_run, progress)
        if not dry_run:
            self._search.drop([gone.key for gone in report.removed if gone.kind == "canonical"])
            for gone in report.removed:
                self._memory.drop(gone.key)
        return report

    def forget(self, chunk_id: str) -> Forgotten:
        """Remove all that was made of a chunk (patches of others formed behind it, embeddings and damaged
        copies as well), look again, and say what is left.

        Raises `RemoteUnavailable` when a remote does not answer; run it again then.
        """
        return forget(self._tiers, self._search, self._codec, self.tenant, chunk_id)

    def rotate(self) -> Rotated:
        """Write every encrypted object again under the first of ``keys``; if interrupted, run it again.

        Raises `StoreError` for a store that is not encrypted.
        """
        return rotate(self._codec, self._disk, self._tiers.remote)

    @property
    def certificates(self) -> tuple[Path, ...]:
        """Folders for certificates that came with this store, its tenant's own first; none in memory."""
        if self._disk is None:
            return ()
        roots = [self._disk.root, *([] if self._tiers.remote else [Path(self.url)])]
        return tuple(dict.fromkeys(root / "certificates" for root in roots))

    def verify(self, *, rebuild: bool = False, progress: Progress = lambda done, total: None) -> VerifyReport:
        """Read every object of the directory, whoever's it is; damaged ones go to quarantine.

        What dead writers left is collected, and index and files agree afterwards; with ``rebuild`` the
        index is made anew from the files first. ``progress`` is called with objects done and in all.
        """
        if self._disk is None:
            return self._tiers.verify(rebuild=rebuild, progress=progress)
        report = self._tiers.verify(rebuild=rebuild, progress=progress)
        contexts = {info.context for info in self._rows(kind="canonical")}
        return replace(report, embeddings=tuple(self._search.check(contexts)))

    def rebuild_index(self) -> int:
        """Make the directory's index anew from the files; how many objects it lists."""
        if self._disk is None:
            return len(self._memory.infos())
        return self._disk.rebuild_index()

    def quarantined(self) -> list[Quarantined]:
        """The damaged objects of the directory that were set aside, whoever's they are."""
        return [] if self._disk is None else self._disk.quarantined()

    def drop_quarantined(self, name: str) -> int:
        """Delete one copy in quarantine (by its ``file``) or all of one object; how many."""
        return 0 if self._disk is None else self._disk.drop_quarantined(name)

    def _own_info(self, key: str) -> ObjectInfo | None:
        """What ``key`` is if it is this tenant's. `ValueError` if it is no key."""
        if not is_key(key):
            raise ValueError(f"{key!r} is no key: 64 lower-case hex digits")
        info = self._tiers.info(key, certain=True)
        return None if info is None or info.context.tenant != self.tenant else info

    def _directory(self, verb: str) -> DiskTier:
        if self._disk is None:
            raise StoreError(f"cannot {verb} in {self.url}: only a store directory has pins and a collector")
        return self._disk

    def _rows(
        self,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ObjectInfo]:
        if self._disk is not None and self._tiers.remote is None:
            return self._disk.index.rows(
                tenant=self.tenant, kind=kind, chunk_id=chunk_id, context=context, limit=limit, offset=offset
            )
        found = [
            info
            for info in self._tiers.infos()
            if kind in (None, info.kind)
            and chunk_id in (None, info.chunk_id)
            and context in (None, info.context)
        ]
        return found[offset:][:limit]


def check_kind(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
