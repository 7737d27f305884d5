"""Upkeep of a store: what is in it, whether it is sound, what stays and what goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kamera.errors import RemoteUnavailable, StoreError
from kamera.store.codec import Codec
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
    canonical_key,
    is_key,
)
from kamera.store.memory import MemoryTier, parse_size
from kamera.store.remote.ledger import remote_of
from kamera.store.seal.rotate import Rotated, rotate
from kamera.store.search.lookback import Search
from kamera.store.tiers import Tiers
from kamera.store.upkeep.bundle import Progress
from kamera.store.upkeep.forget import Forgotten, forget
from kamera.store.upkeep.gc import clean
from kamera.store.upkeep.gc_remote import clean_remote
from kamera.store.upkeep.pinbooks import book_of
from kamera.store.upkeep.pins import PinBook
from kamera.store.upkeep.release import Judged, Ward


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
        self._tiers.sweep()
        if self._disk is not None and self._tiers.remote is None:
            return self._disk.index.census(self.tenant, kind)
        return Census.of(self._rows(kind=kind), KINDS if kind is None else (kind,))

    def stats(self) -> StoreStats:
        """Counts and bytes of this tenant's objects, and the memory tier's counters."""
        self._tiers.sweep()
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
            directory=disk is not None,
        )

    def pin(self, keys: Iterable[str], ttl: float | None = None) -> None:
        """Keep objects of this tenant through `gc`, for ``ttl`` seconds or for good; all or none.

        Raises `PinsFull` over the store's cap (`pins`), `StoreError` for an object that is not stored,
        `RemoteUnavailable`. Pins of a remote are beside its objects, and every client's `gc` honours them;
        in ``memory://`` they are this process's.
        """
        names = list(dict.fromkeys(keys))
        found = self._own_infos(names)
        homes = {
            key: self._codec.name(canonical_key(info.context, info.chunk_id))
            for key, info in found.items()
            if info.kind != "canonical"
        }
        self.pins.pin([(key, info.bytes) for key, info in found.items()], ttl, homes)
        remote = self._tiers.remote
        # someone may have collected it before the pin was there
        there = self._tiers.present(names) if remote is None else remote.present(names)
        gone = set(names) - there - set(self._tiers.pending())
        if gone:
            self.pins.unpin(names)
            raise StoreError(f"{self.url} has lost {min(gone)} meanwhile: nothing was pinned")

    def unpin(self, keys: Iterable[str]) -> int:
        """Let objects of this tenant, or that are gone, leave again; how many of them were pinned."""
        mine = list(dict.fromkeys(keys))
        if self._disk is not None and self._tiers.remote is None:  # a directory's pins are of all tenants
            mine = [key for key in mine if self._own_info(key) is not None or self._tiers.info(key) is None]
        return self.pins.unpin(mine)

    @property
    def pins(self) -> PinBook:
        """The store's pins: of a directory all tenants', of a remote its own, else this process's."""
        return book_of(self._tiers)

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
        ``dry_run``: only say what would go. ``progress`` is called with objects gone and to go. Of a remote
        all its objects are weighed, none by its use, as nobody counts those there. Raises `StoreError` for
        ``memory://``, which has a limit of its own, and for a remote's cache opened without the remote.
        """
        limit = None if max_bytes is None else parse_size(max_bytes)
        remote, disk = self._tiers.remote, self._disk
        if remote is not None:
            if every_tenant:
                raise StoreError(f"{self.url} keeps tenants apart: collect for each of them")
            report = clean_remote(self._tiers, remote, limit, quarantine_age, dry_run, progress)
        elif disk is None:
            raise StoreError(f"cannot collect in {self.url}: bound it by opening it with memory_limit=")
        else:
            self._refuse_cache("collect", ", or bound the cache by opening it with disk_limit=")
            report = clean(
                disk, None if every_tenant else self.tenant, limit, quarantine_age, dry_run, progress
            )
        if not dry_run:
            self._search.drop([gone.key for gone in report.removed if gone.kind == "canonical"])
            for gone in report.removed:
                self._memory.drop(gone.key)
        return report

    def forget(self, chunk_id: str) -> Forgotten:
        """Remove all that was made of a chunk (patches of others formed behind it, embeddings and damaged
        copies as well), look again, and say what is left.

        The start of an id does, if it is that of one chunk only: `UnknownChunk` or `AmbiguousId` otherwise. A
        whole id that nothing is of makes a report without ``removed``. Raises `RemoteUnavailable` when a
        remote does not answer; run it again then. `StoreError` for the cache of a remote that was opened
        without it, which cannot speak for it.
        """
        self._refuse_cache("forget")
        return forget(self._tiers, self._search, self._codec, self.tenant, chunk_id)

    def rotate(self) -> Rotated:
        """Write every encrypted object again under the first of ``keys``; if interrupted, run it again.

        Raises `StoreError` for a store that is not encrypted, a remote that cannot compare before it
        replaces, and the cache of one that was opened without it.
        """
        self._refuse_cache("rotate")
        return rotate(self._codec, self._tiers)

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
        """The damaged objects that were set aside: all of a directory, this tenant's of a remote."""
        return self._ward.copies()

    def drop_quarantined(self, name: str) -> int:
        """Delete one copy in quarantine (by its ``file``) or all of one object; how many."""
        return self._ward.drop(name)

    def judge_quarantined(self, file: str) -> Judged:
        """Read a copy in quarantine again, every byte of it; nothing is changed."""
        return self._ward.judge(file)

    def release_quarantined(self, file: str) -> Judged:
        """Put a copy in quarantine (by its ``file``) back, if it is sound and nothing stands in its place.

        Otherwise it stays, and ``reason`` says why. Raises `StoreError` if there is no such copy.
        """
        return self._ward.release(file, self._search)

    def names(self) -> list[str]:
        """All objects by name, readable or not; of a directory whoever's. Raises `RemoteUnavailable`."""
        disk, remote = self._disk, self._tiers.remote
        here = [info.key for info in self._memory.infos()] if disk is None else disk.names()
        return sorted({*here, *([] if remote is None else remote.names())})

    def raw(self, name: str) -> bytes | None:
        """The bytes of an object as they lie in directory or remote, unverified; None if there is none."""
        found = None if self._disk is None else self._disk.load(name)
        if found is not None or self._tiers.remote is None:
            return None if found is None else found[0]
        return self._tiers.remote.raw(name)

    @property
    def codec(self) -> Codec:
        """What makes objects of bytes here, and tells which are none."""
        return self._codec

    def reach(self) -> None:
        """Raise `RemoteUnavailable` if there is a remote and it does not answer."""
        try:
            if self._tiers.remote is not None:
                self._tiers.remote.reach()
        except RemoteUnavailable as error:
            raise RemoteUnavailable(f"{self.url} does not answer: {error}") from error

    @property
    def _ward(self) -> Ward:
        return Ward(self._tiers, self._codec, self.tenant)

    def _own_info(self, key: str) -> ObjectInfo | None:
        """What ``key`` is if it is this tenant's. `ValueError` if it is no key."""
        check_key(key)
        info = self._tiers.info(key, certain=True)
        return None if info is None or info.context.tenant != self.tenant else info

    def _refuse_cache(self, verb: str, else_: str = "") -> None:
        """Raise `StoreError` if this is the directory in front of a remote, opened by itself."""
        behind = None if self._disk is None or self._tiers.remote else remote_of(self._disk.root)
        if self._disk is not None and behind is not None:
            raise StoreError(
                f"{self._disk.root} is the cache of {behind}: open that with this as cache= (--cache) to "
                f"{verb}{else_}"
            )

    def _own_infos(self, keys: list[str]) -> dict[str, ObjectInfo]:
        """What these are. Raises `StoreError` unless all of them are this tenant's objects."""
        for key in keys:
            check_key(key)
        found = {}
        for key, info in zip(keys, self._tiers.infos_of(keys), strict=True):
            if info is None or info.context.tenant != self.tenant:
                raise StoreError(f"{self.url} has no object {key!r} of this tenant: nothing was pinned")
            found[key] = info
        return found

    def _rows(
        self,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ObjectInfo]:
        self._tiers.sweep()
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


def check_key(key: str) -> None:
    if not is_key(key):
        raise ValueError(f"{key!r} is no key: 64 lower-case hex digits")
