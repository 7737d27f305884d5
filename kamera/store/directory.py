"""The directory tier: one file per object, an index beside them, and a quarantine for damaged files.

A file appears whole or not at all (written aside, synced, renamed), and its row follows it. So the files are
always right, and a look-up by key asks nothing else. What is put together is written together: all files
aside, by several threads, each synced; then all names, one sync of these, and one transaction for the rows.

A writer writes in a folder of its own below ``tmp/``, which it holds locked: the system frees the lock when
the process ends, in any way, and the next writer clears up. Names of objects are added and removed under one
lock (`Directory.locked`); readers lock nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from kamera import forks
from kamera.errors import CorruptChunk, KameraError, StoreError, StoreFull, StoreReadOnly, StoreVersionError
from kamera.files import FOLDER, Folder, NotAFile, lock_path, publish_file, try_lock
from kamera.store.crypt import Sealed
from kamera.store.format import UNREADABLE, Codec, Source, read_bytes
from kamera.store.index import USES, Index, Row, Stamped
from kamera.store.keys import PATCH_KINDS, is_key
from kamera.store.memory import Pin, Pinned, Pins, pins_of, pins_text
from kamera.store.records import Header, Held, ObjectInfo, Record
from kamera.trust import outranks

logger = logging.getLogger(__name__)

MARKER = "kamera-store.json"
"""The file that marks a directory as a store and states its kind."""
TENANTS = "tenants"
"""Folder of a store directory for the directories of tenants with a secret."""

_T = TypeVar("_T")
_SUFFIX = ".safetensors"
_PINS = "keep.json"
_WRITER = re.compile(r"[0-9a-f]{16}")
_COPY = re.compile(r"([0-9a-f]{64})\.(\d{1,20})(\.safetensors)?")
_WORKERS = 4  # files of a batch that are written at once: each has an object's bytes
_READERS = 8  # most threads that read the pieces of an object
_SLACK = 0.9  # share of a cache's limit left after an eviction, so that not every object causes one
_STALE_SECONDS = 3600.0  # age of files in tmp/ to remove that are in no writer's folder


class PutOrder(NamedTuple):
    """A record to be stored under ``name``, by ``replace`` over the one that is there.

    ``needs``: the name of another in the batch that it depends on. ``file``: what it is encoded as already.
    """

    name: str
    record: Record
    replace: bool
    needs: str = ""
    file: tuple[ObjectInfo, list[bytes | memoryview]] | None = None

    @property
    def rank(self) -> int:
        """Place in a batch: canonicals need their encodings, patches their canonicals."""
        return 0 if self.record.kind == "encoding" else 2 if self.record.kind in PATCH_KINDS else 1

    def is_refused(self, outcomes: dict[str, Any]) -> bool:
        """True if the object that it needs was refused: then it is, too, for the same reason."""
        why = outcomes.get(self.needs)
        if isinstance(why, Exception):
            outcomes[self.name] = why
        return isinstance(why, Exception)


@dataclass(frozen=True)
class Quarantined:
    """A damaged object ``name`` set aside as ``file``; ``when`` in seconds since 1970. The log says why."""

    file: str
    name: str
    bytes: int
    when: float

    @classmethod
    def of(cls, file: str, size: int) -> Quarantined | None:
        """The copy of ``size`` bytes in a file named by an object and a time in ns; None for another file."""
        match = _COPY.fullmatch(file)
        return None if match is None else cls(file, match[1], size, int(match[2]) / 1e9)


class Directory:
    """Objects under one directory. Safe to use from several threads and processes.

    Every name passed in is one of its ``codec``; else `ValueError` (`keys.is_key`). ``read_only``, or in a
    folder that cannot be written: nothing is changed, and a method that would change it raises
    `StoreReadOnly`. With a ``limit`` its objects, those of other processes included, take at most so many
    bytes, but for what others write at the same moment: those used least recently leave, canonicals with
    their patches, encodings after their canonicals, and what is pinned stays. As the cache of a remote
    (``cached``: its url) only what that has may leave, and an object without room is kept all the same.

    Raises `StoreError` when the operating system refuses, `StoreVersionError` for a directory of another
    format (which is left untouched).
    """

    def __init__(
        self,
        root: Path,
        codec: Codec,
        *,
        read_only: bool = False,
        limit: int | None = None,
        cached: str | None = None,
    ) -> None:
        with self._translate("open", root):
            if isinstance(codec, Sealed):
                with (
                    _open_root(root, Codec().marker, make=not read_only) as outer,
                    outer.sub(TENANTS, make=not read_only) as tenants,
                ):
                    outer.sync()
                    tenants.sub(codec.folder, make=not read_only).close()
                    tenants.sync()
                root = root / TENANTS / codec.folder
            self.root = root
            self.codec = codec
            self.url = str(root)
            self._root = _open_root(root, codec.marker, make=not read_only, cached=cached)
            self.read_only = read_only or not os.access(root, os.W_OK)
            for name in self._root.names():  # SQLite would follow a link
                if stat.S_ISLNK((self._root.status(name) or os.stat(root)).st_mode):
                    raise NotAFile(f"{root / name} is a link, and a store follows no links: remove it")
            self._objects, self._tmp, self._quarantine = map(self._open, ("objects", "tmp", "quarantine"))
            if not self.read_only:
                self._root.sync()
        self.pins = Pins(alone=self.locked, load=self._load_pins, save=self._save_pins)
        """Of all tenants, in one small file, which is written whole."""
        self.index = Index(root / "index.sqlite", self, codec, read_only=self.read_only)
        self._limit = limit
        self._cached = cached
        self._stuck = False  # no more may leave a cache until the remote has more
        self._room = threading.Lock()
        self._readers = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "kamera-read")
        self._names = forks.Lock()  # threads queue here, and ask for the processes' lock one at a time
        self._depth = 0
        if not self.read_only:
            self.remove_leftovers()

    @property
    def caches(self) -> str | None:
        """The url (without credentials) of the remote that the directory caches; None if it caches none."""
        with self._translate("read"):
            url: str | None = json.loads(self._root.read(MARKER)[0]).get("caches")
            return url

    # -- reading -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of all objects, of all tenants, on the disk; from the files. Any other file is ignored."""
        with self._translate("list the objects"):
            if not self.read_only:
                self._objects.sync()
            files = [name for name in self._objects.names() if name.endswith(_SUFFIX)]
            return [name for file in files if is_key(name := file.removesuffix(_SUFFIX))]

    def stamp(self, name: str, *, is_use: bool = False) -> str | None:
        """A text that changes whenever the object's file does; None if there is none. ``is_use``: noted."""
        try:
            status = os.stat(file_of(name), dir_fd=self._objects.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal("read", error) from error
        if is_use:
            with self.index.counting:
                self.index.uses[name] = time.time()
                is_due = len(self.index.uses) >= USES
            if is_due:
                self.index.write_uses()
        return _stamp_of(status)

    def read(self, name: str, *, whole: bool = False) -> Held | None:
        """The object ``name``, verified to the last byte; None if there is none. ``whole``: and its bytes.

        Anything else there goes to quarantine, and `CorruptChunk` is raised. Raises `StoreVersionError` and
        `WrongKey` as `Codec.read`: then it stays where it is.
        """

        def read(file: Source, stamp: str) -> Held:
            data = read_bytes(file, 0, file.size) if whole else b""
            source = Source.of(data) if whole else file
            found = self.codec.read(source, name, self._where(name), self._readers)
            return found._replace(stamp=stamp, data=data)

        return self._use(name, read)

    def load(self, name: str) -> bytes | None:
        """The bytes under ``name``, unverified; not counted as a use."""
        return self._use(name, lambda file, _: read_bytes(file, 0, file.size))

    def header(self, name: str) -> Header | None:
        """The header of ``name``, its tensors unverified. Raises as the codec; nothing is moved."""
        with self._translate("read"):
            try:
                with self._objects.reading(file_of(name)) as (descriptor, status):
                    file = Source.file(descriptor, status.st_size)
                    return self.codec.read_header(file, name, self._where(name))
            except FileNotFoundError:
                return None
            except NotAFile as error:
                raise CorruptChunk(str(error)) from error

    def info(self, name: str) -> ObjectInfo | None:
        """The description of ``name`` by its file's header: callers decide by it, and a row may be wrong."""
        return self._use(name, lambda file, _: self.codec.read_info(file, name, self._where(name)))

    def peek(self, name: str) -> Stamped | None:
        """The row of ``name`` by its header; None if it is gone, or cannot be read and stays where it is."""
        return self._described(self._objects, file_of(name), name, self._where(name))

    def is_intact(self, name: str) -> bool:
        """True if ``name`` is stored, and may stay: it is as its row says, or else as its digests say.

        A damaged one is quarantined. A row is written once its file's name is on the disk.
        """
        stamp = self.stamp(name)
        if stamp is None:
            return False
        row = self.index.get(name)
        try:
            if row is not None and row[1] == stamp:
                return self.info(name) is not None
            with self._translate("read"):
                self._objects.sync()
            if self.read(name) is None:
                return False
            self.index.correct([name])  # its writer may have died before it came to that
            return True
        except CorruptChunk:
            return False
        except UNREADABLE:  # no damage: a reader with the right version or key still finds it
            return True

    # -- writing -------------------------------------------------------------------------------

    def put_many(self, orders: Sequence[PutOrder]) -> list[Stamped | Exception | None]:
        """Store records of different names; return the row and stamp of each, or the error that refused it.

        When this returns, those without an error survive a loss of power. After any interruption, either the
        old or the new object is stored, of each by itself. Without ``replace`` a stored, intact object stays,
        and a patch that was formed behind stronger KV stays in any case: None is returned then, and so it is
        if another writer was faster.
        """
        results: dict[str, Stamped | Exception | None] = {}
        try:
            with self.changing("write"):
                self.remove_leftovers()
                with self._aside() as aside:
                    parts = self._write_aside(orders, aside, results)
                    self._bring(parts, aside, results)
        except KameraError as error:
            return [error] * len(orders)
        return [results[order.name] for order in orders]

    def delete(self, name: str, stamp: str | None = None) -> bool:
        """Remove the object ``name``; True if this removed it: a loss of power does not bring it back.

        With a ``stamp`` only if its file still has that, and without waiting for the disk.
        """
        with self.changing("delete" if stamp is None else "evict"):
            with self.locked():
                is_gone = stamp in (None, self.stamp(name)) and self._objects.remove(file_of(name))
            if stamp is None and is_gone:
                self._objects.sync()
            if is_gone or stamp is None:
                self.index.drop(name)
            else:
                self.index.correct([name])  # its row is of another file, or of none
            return is_gone

    def remove_leftovers(self) -> int:
        """Remove files left by dead writers; return their number."""
        count, oldest = 0, time.time() - _STALE_SECONDS
        with self.changing("clear up"):
            for entry in self._tmp.names():
                status = self._tmp.status(entry)
                if _WRITER.fullmatch(entry):
                    # what cannot be removed now is no writer's, or met by the next one again
                    with contextlib.suppress(OSError), self._claimed(entry) as folder:
                        count += 0 if folder is None else self._clear(folder, entry)
                elif status is not None and stat.S_ISREG(status.st_mode) and status.st_mtime < oldest:
                    count += self._tmp.remove(entry)
        return count

    def unfinished(self) -> list[str]:
        """What is being written, as paths below ``tmp/``: a writer's folder, and the object's name."""
        with self._translate("read"):
            found: list[str] = []
            for entry in self._tmp.names():
                with (
                    contextlib.suppress(FileNotFoundError, NotADirectoryError),
                    self._tmp.sub(entry) as folder,
                ):
                    found += [f"{entry}/{name}" for name in folder.names()]
            return found

    def evict_over_limit(self) -> None:
        """Let go of what no longer fits a cache: it was opened, or its remote has more now."""
        self._stuck = False
        self._make_room(set(), 0)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other threads and processes from adding and removing names of objects, and pins."""
        with self._names:
            if self._depth:
                yield
                return
            with self._translate("lock"), lock_path(self._objects.path):
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1

    # -- quarantine ----------------------------------------------------------------------------

    def copies(self) -> list[Quarantined]:
        """All copies in quarantine, by name and time; of all tenants."""
        with self._translate("list the quarantine"):
            statuses = [(name, self._quarantine.status(name)) for name in self._quarantine.names()]
        sizes = [(n, s.st_size if stat.S_ISREG(s.st_mode) else 0) for n, s in statuses if s is not None]
        return [copy for name, size in sizes if (copy := Quarantined.of(name, size)) is not None]

    def copy_info(self, file: str) -> ObjectInfo | None:
        """The description of a copy from its header, of any tenant; None if it cannot be read."""
        row = self._described(self._quarantine, file, file.partition(".")[0], file)
        return None if row is None else row[0]

    def delete_copy(self, file: str) -> None:
        """Delete a copy in quarantine."""
        with self.changing("delete"):
            if Quarantined.of(file, 0) is not None and self._quarantine.remove(file):
                self._quarantine.sync()

    def close(self) -> None:
        """Close the index; the objects are already safe."""
        self._readers.shutdown(cancel_futures=True)
        self.index.close()

    # -- pins ----------------------------------------------------------------------------------

    def _load_pins(self) -> Pinned:
        try:
            return pins_of(self._root.read(_PINS)[0])
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError) as error:
            raise StoreError(
                f"pins {self.root / _PINS}: {error}; if it is damaged, delete it and pin again: until then "
                "nothing is removed"
            ) from error

    def _save_pins(self, pins: dict[str, Pin], cap: int | None, changed: Sequence[str]) -> None:
        with self.changing("pin"), publish_file(self.root / _PINS) as file:
            file.write(pins_text(pins.values(), cap))

    # -- inside --------------------------------------------------------------------------------

    def _open(self, name: str) -> Folder:
        """A folder of this directory, made if it can be; one that cannot, to be read only, is as empty."""
        try:
            return self._root.sub(name, make=not self.read_only)
        except FileNotFoundError:
            return _Empty(self.root / name, os.dup(self._root.descriptor))

    def _where(self, name: str) -> str:
        return str(self._objects.path / file_of(name))

    def _use(self, name: str, work: Callable[[Source, str], _T]) -> _T | None:
        """What ``work`` makes of the file of ``name`` and its stamp; None if there is none.

        What cannot be an object goes to quarantine, and `CorruptChunk` names its new path.
        """
        stamp: str | None = None
        with self._translate("read"):
            try:
                with self._objects.reading(file_of(name)) as (descriptor, status):
                    stamp = _stamp_of(status)
                    return work(Source.file(descriptor, status.st_size), stamp)
            except FileNotFoundError:
                return None
            except NotAFile as error:
                damage, stamp = CorruptChunk(str(error)), self.stamp(name)
            except EOFError as error:
                damage = CorruptChunk(f"{self._where(name)}: truncated: {error}")
            except CorruptChunk as error:
                damage = error
        self._set_aside(name, stamp, damage)

    def _described(self, folder: Folder, file: str, name: str, where: str) -> Stamped | None:
        """The row of ``name`` by the header of a file; None if that is gone, or cannot be read."""
        with self._translate("read"):
            try:
                with folder.reading(file) as (descriptor, status):
                    source = Source.file(descriptor, status.st_size)
                    return self.codec.read_info(source, name, where), _stamp_of(status)
            except FileNotFoundError:
                return None
            except (*UNREADABLE, NotAFile) as error:
                if folder is self._objects:
                    logger.warning("not indexed: %s", error)  # reading it by key reports the fault
                return None

    def _set_aside(self, name: str, stamp: str | None, error: CorruptChunk) -> NoReturn:
        if self.read_only:
            raise error
        copy = f"{name}.{time.time_ns()}{_SUFFIX}"
        with self._translate("quarantine"):
            with self.locked():
                if stamp is None or self.stamp(name) != stamp:  # no longer the file that was read
                    raise error
                self._objects.move(file_of(name), self._quarantine, copy)
            self.index.drop(name)
        place = self._quarantine.path / copy
        logger.warning("damaged object %s moved to %s", name, place)
        raise type(error)(f"{error}; moved to {place}") from error

    @contextlib.contextmanager
    def _aside(self) -> Iterator[Folder]:
        """A new folder below ``tmp/``, locked, and gone afterwards."""
        folder, entry = None, ""
        with contextlib.ExitStack() as stack:
            while folder is None:  # else another cleared it up before it was locked
                entry = secrets.token_hex(8)
                os.mkdir(entry, 0o700, dir_fd=self._tmp.descriptor)
                with contextlib.suppress(FileNotFoundError):
                    folder = stack.enter_context(self._claimed(entry))
            try:
                yield folder
            finally:
                with contextlib.suppress(OSError):  # whoever comes next clears it up
                    self._clear(folder, entry)

    @contextlib.contextmanager
    def _claimed(self, entry: str) -> Iterator[Folder | None]:
        """The folder ``entry`` below ``tmp/``, locked; None if its writer lives. Or `FileNotFoundError`."""
        with forks.open_lockable() as descriptors:
            descriptor = os.open(entry, FOLDER | os.O_NOFOLLOW, dir_fd=self._tmp.descriptor)
            descriptors.add(descriptor)
        try:
            if not try_lock(descriptor):
                yield None
                return
            # a descriptor of its own, which a forked child may have: it does not hold the lock
            with self._tmp.sub(entry) as folder:
                if not os.path.samestat(os.fstat(descriptor), os.fstat(folder.descriptor)):
                    raise FileNotFoundError(entry)
                yield folder
        finally:
            forks.close_lockable(descriptor)

    def _clear(self, folder: Folder, entry: str) -> int:
        """Remove a folder below ``tmp/``; return the number of files in it, and one more."""
        count = sum(folder.remove(name) for name in folder.names())
        os.rmdir(entry, dir_fd=self._tmp.descriptor)
        return count + 1

    def _write_aside(
        self, orders: Sequence[PutOrder], aside: Folder, results: dict[str, Stamped | Exception | None]
    ) -> list[tuple[PutOrder, Stamped, str | None]]:
        """Write what is to be put, and sync it; each with the stamp of the file that is in its place now."""

        def write(order: PutOrder) -> tuple[PutOrder, Stamped, str | None] | Exception | None:
            try:
                info, parts = order.file or self._encoded(order.record)
                old = self.stamp(order.name)
                if (not order.replace or self._outranks(info)) and self.is_intact(order.name):
                    return None
                growth = info.bytes - (0 if old is None else int(old.split("-")[1]))
                self._make_room({order.name, order.needs}, growth)
                return order, (info, _stamp_of(aside.create(order.name, parts))), old
            except OSError as error:
                return self._refusal("write", error)
            except (KameraError, ValueError) as error:
                return error

        if len(orders) < 2 or self._limit is not None:
            written = list(map(write, orders))  # room is given in their order
        else:
            with ThreadPoolExecutor(_WORKERS, "kamera-write") as pool:
                written = list(pool.map(write, orders))
        parts = []
        for order, part in zip(orders, written, strict=True):
            if isinstance(part, tuple):
                parts.append(part)
            else:
                results[order.name] = part
        return parts

    def _encoded(self, record: Record) -> tuple[ObjectInfo, list[bytes | memoryview]]:
        """The file of ``record`` as it is written now, and its info. Raises as `Codec.parts`."""
        created = round(time.time(), 3)
        parts = self.codec.parts(record, created)
        return self.codec.describe(record, created, sum(map(len, parts))), parts

    def _bring(
        self,
        parts: Sequence[tuple[PutOrder, Stamped, str | None]],
        aside: Folder,
        results: dict[str, Stamped | Exception | None],
    ) -> None:
        """Give what was written aside its name, sync these, and write the rows."""
        rows: list[Stamped] = []
        try:
            with self.locked():
                for order, row, old in parts:
                    if order.is_refused(results):
                        continue
                    now, name = self.stamp(order.name), order.name
                    try:
                        # another writer was faster, and its object stays
                        if now not in (None, old) and (not order.replace or self._outranks(row[0])):
                            results[name] = None
                            continue
                        aside.move(name, self._objects, file_of(name))
                        rows.append(row)
                    except OSError as error:
                        results[name] = self._refusal("write", error)
            if parts:
                self._objects.sync()  # also for what stays: its writer may not have come to that
            if rows:
                self.index.put(rows)
        except BaseException:
            self.index.doubt()
            raise
        results.update((row[0].key, row) for row in rows)

    def _outranks(self, info: ObjectInfo) -> bool:
        """True if the object stored under the name of ``info`` was formed behind stronger KV."""
        row = None if info.formed is None or self.stamp(info.key) is None else self.peek(info.key)
        return row is not None and outranks(row[0].formed, info.formed)

    def _make_room(self, needed: set[str], size: int) -> None:
        """Remove objects so that ``size`` more bytes fit. Raises `StoreFull` if that is impossible."""
        limit = self._limit
        if limit is None or self._stuck:
            return
        with self._room:
            stored = self.index.bytes()
            if stored + size > limit and (self._cached or size <= limit):
                stored = self._evict(int(limit * (_SLACK if self._cached else 1)) - size, needed)
        if stored + size > limit and not self._cached:
            raise StoreFull(
                f"store {self.root}: {size} bytes more are over its disk_limit of {limit}, and what is "
                "pinned stays: raise the limit, or unpin something"
            )
        self._stuck = stored + size > limit

    def _evict(self, most: int, needed: set[str]) -> int:
        """Remove objects until ``most`` bytes are left, if so many may leave; return the bytes left."""
        for _ in range(2):  # a row may turn out to be of another file than there is
            rows = list(self.index.rows())
            with self.pins.alone():
                keep = self.pins.names_to_keep() | needed
                if self._cached:
                    keep |= {row.key for row in rows if row.sent != row.stamp}
                left = [row for row in leaving(rows, keep, most) if not self.delete(row.key, row.stamp)]
            if not left:
                break
        return self.index.bytes()

    def _refusal(self, verb: str, error: OSError) -> StoreError:
        return StoreError(f"store {self.root}: cannot {verb}: {error}")

    def changing(self, verb: str) -> contextlib.AbstractContextManager[None]:
        """Inside, the directory is changed. Raises `StoreReadOnly` where it is read only."""
        if self.read_only:
            raise StoreReadOnly(
                f"store {self.root}: cannot {verb}: it is open to be read only: open it without "
                "read_only= in a folder that can be written"
            )
        return self._translate(verb)

    @contextlib.contextmanager
    def _translate(self, verb: str, root: Path | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"store {root or self.root}: cannot {verb}: {error}") from error


class _Empty(Folder):
    """A folder that is not there, of a directory that is only read."""

    def status(self, name: str) -> os.stat_result | None:
        return None

    def open(self, name: str) -> int:
        raise FileNotFoundError(name)

    def names(self) -> list[str]:
        return []


def leaving(rows: Sequence[Row], keep: set[str], most: int | None) -> Iterator[Row]:
    """The objects that leave, in order, so that the rest is at most ``most`` bytes (None: any number).

    Patches without their canonical leave in any case. Of the rest the least recently used leave first, none
    before those that are of no use without it. What is in ``keep`` stays, and so does what that needs.
    """
    by_key = {row.key: row for row in rows}
    used, kept = {row.key: row.used for row in rows}, set(keep)
    order = {"encoding": 2, **dict.fromkeys(PATCH_KINDS, 0)}
    for row in sorted(rows, key=lambda row: order.get(row.kind, 1)):  # patches, canonicals, encodings
        if row.home in by_key:
            used[row.home] = max(used[row.home], used[row.key])
            if row.key in kept:
                kept.add(row.home)
    total = sum(row.bytes for row in rows)
    free = [row for row in rows if row.key not in kept]
    orphans = [row for row in free if row.kind in PATCH_KINDS and row.home not in by_key]
    total -= sum(row.bytes for row in orphans)
    yield from orphans
    gone = {row.key for row in orphans}
    for row in sorted(free, key=lambda row: (used[row.key], order.get(row.kind, 1), row.created, row.key)):
        if most is None or total <= most:
            return
        if row.key not in gone:
            total -= row.bytes
            yield row


@lru_cache(4096)  # every look-up, of a hit in memory too, asks for its file's stamp
def file_of(name: str) -> str:
    """The name of an object's file. Raises `ValueError` for what is no name: no path is built from it."""
    if not is_key(name):
        raise ValueError(f"{name!r} is no object's name: 64 lower-case hex digits")
    return name + _SUFFIX


def _stamp_of(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _open_root(root: Path, marker: Mapping[str, Any], *, make: bool, cached: str | None = None) -> Folder:
    """The store directory ``root`` with this ``marker``; made if it is empty or absent and ``make``.

    ``cached``: the url of the remote that it caches. Raises `OSError`, `StoreError` for another use,
    `StoreVersionError` for another format; nothing changes then.
    """
    with contextlib.suppress(FileNotFoundError):
        folder = Folder.at(root)
        try:
            _check_marker(root, folder.read(MARKER)[0], marker, cached)
            return folder
        except FileNotFoundError:
            names = folder.names()
        if MARKER in names:  # another process has just made the store
            return _open_root(root, marker, make=make, cached=cached)
        if any(not name.startswith(".kamera") for name in names):
            raise StoreError(
                f"{root} is not empty and no kamera store (no {MARKER}): give an empty or new directory"
            )
    if not make:
        raise StoreError(f"{root} is no kamera store, and none is made to be read only")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # the marker comes first, so that a half-made store is never taken for another program's folder
    _write_marker(root, {**marker, **({"caches": cached} if cached else {})})
    with Folder.at(root.parent) as parent:
        parent.sync()
    return Folder.at(root)


def _check_marker(root: Path, text: bytes, marker: Mapping[str, Any], cached: str | None) -> None:
    place, right = root / MARKER, json.dumps(dict(marker))
    try:
        found = json.loads(text)
        version, caches = found["format"], found.pop("caches", None)
        if type(version) is not int or version < 1:
            raise ValueError(f"format {version!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{place} is damaged ({error}); restore it: {right}") from error
    if version != marker["format"]:
        raise StoreVersionError(
            f"{root} is a store of format {version}, this version reads {marker['format']} here: give the "
            "secret the store was made with, open it with the kamera that made it, or take a new directory"
        )
    if found != dict(marker):
        raise StoreError(f"{root} was made as {json.dumps(found)}, not as {right}: open it as it was made")
    if cached is not None and caches is None:
        _write_marker(root, {**found, "caches": cached})
    elif cached is not None and caches != cached:
        raise StoreError(
            f"{place}: this is the cache of {caches}, not of {cached}: give each remote a directory of its "
            "own"
        )


def _write_marker(root: Path, marker: Mapping[str, Any]) -> None:
    with publish_file(root / MARKER) as file:
        file.write(json.dumps(dict(marker)).encode())
