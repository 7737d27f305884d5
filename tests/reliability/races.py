"""Three processes of three threads in one directory of two tenants; ``--size`` is each thread's operations.

One tenant's objects are put, read, listed and forgotten; the other's are put, pinned, unpinned and
collected to nothing, again and again. All the while every process opens and closes the directory for
either tenant. Everybody keeps to chunks of his own, so each knows what must be there.

A finding: an operation that fails (but a pin of what was collected already), a thread that has not ended
after `SECONDS`, an acknowledged object that is not read or not listed, during the run or afterwards, one
that was forgotten and is still there, an acknowledged pin that does not hold, a database that fails
``PRAGMA integrity_check``, and what ``verify`` finds damaged or not listed.
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from kamera.errors import KameraError
from kamera.store import ChunkStore, StoreAdmin
from tests.reliability.findings import Child, Findings

PROCESSES, THREADS = 3, 3
SECONDS = 600.0
KEPT, SWEPT = "kept", "swept"
"""The tenants: nobody collects of the first."""
_OWN = 12  # chunks of each thread and tenant


@dataclass
class Knows:
    """What one thread knows: versions of its objects, its pins, what it has forgotten.

    Of an object in the middle of an operation, or of one that failed, it knows nothing.
    """

    kept: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)


def run(size: int, seed: int) -> dict[str, Any]:
    """``size`` operations of each thread, and what is there afterwards."""
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        _open(root, KEPT).close()
        children = [Child(lambda i=i: _process(root, i, size, seed), SECONDS) for i in range(PROCESSES)]
        ends = [child.ended() for child in children]
        for path in sorted(root.rglob("*.sqlite")):
            _sound(path, found)
        for end in ends:
            if end.how != "returned":
                found.add(f"a process {end.how}", end.why)
                continue
            found.learn(end.result["findings"])
            for kept, pinned, forgotten in end.result["threads"]:
                versions = {int(slot): version for slot, version in kept.items()}
                knows = Knows(versions, set(pinned), set(forgotten))
                _guarded(found, "afterwards", lambda k=knows: _afterwards(root, k, found))
        for tenant in (KEPT, SWEPT):
            _guarded(found, "verify", lambda t=tenant: _verified(root, t, found))
    return found.figures()


def _process(root: Path, number: int, size: int, seed: int) -> dict[str, Any]:
    found = Findings()
    with _open(root, KEPT) as kept, _open(root, SWEPT) as swept, ThreadPoolExecutor(THREADS) as pool:
        threads = [pool.submit(_thread, root, kept, swept, number, i, size, seed) for i in range(THREADS)]
        told = [thread.result() for thread in threads]
    for one, _ in told:
        found.learn(one.told())
    threads = [[k.kept, sorted(k.pinned), sorted(k.forgotten)] for _, k in told]
    return {"findings": found.told(), "threads": threads}


def _thread(
    root: Path, kept: ChunkStore, swept: ChunkStore, process: int, number: int, size: int, seed: int
) -> tuple[Findings, Knows]:
    found, knows, rng = Findings(), Knows(), random.Random(f"{seed} {process} {number}")
    first = (process * THREADS + number) * _OWN
    for version in range(1, size + 1):
        slot = first + rng.randrange(_OWN)
        name = rng.choices(list(OPERATIONS), [weight for weight, _ in OPERATIONS.values()])[0]
        _, operation = OPERATIONS[name]
        turn = Turn(root, kept, swept, slot, version, knows, found)
        _guarded(found, name, partial(operation, turn))
        found.done[name] += 1
    return found, knows


# -- operations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One operation: the stores it is on, the chunk it is about, and who keeps account of it."""

    root: Path
    kept: ChunkStore
    swept: ChunkStore
    slot: int
    version: int
    knows: Knows
    found: Findings


def _put(turn: Turn) -> None:
    stored = turn.version if rig.is_patch(turn.slot) else turn.knows.kept.pop(turn.slot, turn.version)
    fresh = rig.is_patch(turn.slot) or turn.slot not in turn.knows.unknown
    turn.knows.unknown.add(turn.slot)
    turn.knows.kept.pop(turn.slot, None)
    turn.knows.forgotten.discard(turn.slot)
    _store(turn.kept, turn.slot, turn.version)
    if fresh:  # else it may be an older one that stays
        turn.knows.kept[turn.slot] = stored
        turn.knows.unknown.discard(turn.slot)


def _read(turn: Turn) -> None:
    held, wanted = _held(turn.kept, turn.slot), turn.knows.kept.get(turn.slot, 0)
    if held != wanted and turn.slot not in turn.knows.unknown:
        turn.found.add("an acknowledged object is another or none", f"slot {turn.slot}")


def _list(turn: Turn) -> None:
    listed = {info.chunk_id for info in turn.kept.ls()}
    missing = [slot for slot in turn.knows.kept if rig.chunk(slot) not in listed]
    turn.found.add("acknowledged and not listed, during the run", f"slots {missing[:5]}", len(missing))


def _forget(turn: Turn) -> None:
    turn.knows.kept.pop(turn.slot, None)
    turn.knows.forgotten.discard(turn.slot)
    turn.knows.unknown.add(turn.slot)
    # what others read cannot be written anew: that is told, and is no trace of an object
    left = [
        why
        for why in StoreAdmin(turn.kept).forget(rig.chunk(turn.slot)).left
        if "somebody reads it" not in why
    ]
    turn.found.add("forget leaves something", str(left), len(left))
    turn.knows.unknown.discard(turn.slot)
    turn.knows.forgotten.add(turn.slot)


def _pin(turn: Turn) -> None:
    key = _store(turn.swept, turn.slot, turn.version)
    was_pinned = turn.slot in turn.knows.pinned
    try:
        StoreAdmin(turn.swept).pin([key])
    except KameraError:
        if was_pinned or _held(turn.swept, turn.slot):
            raise
        turn.found.done["pins of what was collected"] += 1
        return
    turn.knows.pinned.add(turn.slot)


def _unpin(turn: Turn) -> None:
    was_pinned = turn.slot in turn.knows.pinned
    turn.knows.pinned.discard(turn.slot)
    if StoreAdmin(turn.swept).unpin([_record(SWEPT, turn.slot).key]) != 1 and was_pinned:
        turn.found.add("an acknowledged pin was not there to be taken back", f"slot {turn.slot}")


def _collect(turn: Turn) -> None:
    StoreAdmin(turn.swept).gc(0)
    lost = [slot for slot in turn.knows.pinned if not _held(turn.swept, slot)]
    turn.found.add("pinned and gone, during the run", f"slots {lost[:5]}", len(lost))


def _reopen(turn: Turn) -> None:
    with _open(turn.root, (KEPT, SWEPT)[turn.version % 2]) as other:
        other.ls(limit=1)


OPERATIONS: dict[str, tuple[int, Callable[[Turn], None]]] = {
    "put": (30, _put),
    "read": (15, _read),
    "ls": (5, _list),
    "forget": (5, _forget),
    "put and pin": (20, _pin),
    "unpin": (5, _unpin),
    "gc": (5, _collect),
    "open and close": (15, _reopen),
}


# -- afterwards ------------------------------------------------------------------------------------


def _afterwards(root: Path, knows: Knows, found: Findings) -> None:
    with _open(root, KEPT) as kept:
        listed = {info.chunk_id for info in kept.ls()}
        for slot, version in knows.kept.items():
            found.done["acknowledged"] += 1
            found.add("acknowledged and lost", f"slot {slot}", int(_held(kept, slot) != version))
            found.add("acknowledged and not listed", f"slot {slot}", int(rig.chunk(slot) not in listed))
        for slot in knows.forgotten:
            found.add("forgotten and there", f"slot {slot}", int(bool(_held(kept, slot))))
    with _open(root, SWEPT) as swept:
        StoreAdmin(swept).gc(0)
        pins = {pin.name for pin in StoreAdmin(swept).pins.list()}
        for slot in knows.pinned:
            found.done["acknowledged pins"] += 1
            key = _record(SWEPT, slot).key
            found.add("pinned and gone", f"slot {slot}", int(not _held(swept, slot)))
            found.add("pinned and not listed so", f"slot {slot}", int(key not in pins))


def _verified(root: Path, tenant: str, found: Findings) -> None:
    with _open(root, tenant) as store:
        report = StoreAdmin(store).verify()
        found.add("damaged", str(report.quarantined[:1]), len(report.quarantined))
        found.add("not listed until verify", "", report.orphan_files)
        found.add("rows of no object", "", report.orphan_rows)


def _sound(path: Path, found: Findings) -> None:
    """A database that nobody uses any more."""
    try:
        db = sqlite3.connect(path)
        try:
            [(answer,), *_] = db.execute("PRAGMA integrity_check").fetchall()
        finally:
            db.close()
    except sqlite3.Error as error:
        answer = str(error)
    found.done["databases checked"] += 1
    if answer != "ok":
        found.add(f"{path.name} is damaged", answer)


def _guarded(found: Findings, name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        found.add(f"{name}: {type(error).__name__}", str(error))


def _open(root: Path, tenant: str) -> ChunkStore:
    return ChunkStore.open(root, tenant=tenant, memory_limit=0)


def _context(tenant: str) -> Any:
    return replace(rig.CONTEXT, tenant=tenant)


def _record(tenant: str, slot: int, version: int = 1) -> Any:
    return replace(rig.record(slot, version), context=_context(tenant))


def _store(store: ChunkStore, slot: int, version: int) -> str:
    record = _record(store.tenant, slot, version)
    return store.put(record)


def _held(store: ChunkStore, slot: int) -> int:
    """The version that is served; 0 for none, -1 for parts of several."""
    context, chunk = _context(store.tenant), rig.chunk(slot)
    record = (
        store.get_patch(context, chunk, ()) if rig.is_patch(slot) else store.get_canonical(context, chunk)
    )
    return 0 if record is None else rig.version_of(record)
