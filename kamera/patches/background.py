"""Background work: what no answer waits for, done one piece after another in one thread of a backbone.

It gives way to calls (`kamera.engines.work`), and no call waits for it. What it holds is bounded in bytes:
over the bound the pieces of least priority are dropped, and each tells those whom it concerns. What pieces
owe a store is put together: when no piece is left, when one comes that reads it, or when it is much.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch

from kamera import forks
from kamera.content import Encoded
from kamera.engines import Account, Engine, WorkCancelled, calls_of, count_as_later, open_accounts
from kamera.patches.losses import Losses
from kamera.store import CanonicalRecord, ChunkStore, Context, EncodingRecord, PatchRecord

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)


class Waiting(NamedTuple):
    """What background work will put, by context and id: until then each former takes it from here."""

    chunks: dict[tuple[Context, str], Encoded]
    anchors: dict[tuple[Context, str], Any]  # `Anchor`, which knows this file


_waiting: weakref.WeakKeyDictionary[ChunkStore, Waiting] = weakref.WeakKeyDictionary()


def waiting_records(store: ChunkStore) -> Waiting:
    """What waits for a store."""
    return _waiting.setdefault(store, Waiting({}, {}))


@dataclass(frozen=True)
class Owed:
    """Records of one chunk or anchor to be put, the main one last.

    ``losses`` say ``what`` was lost if that fails. ``later``: no call hears of an error that they do not
    bear, so the next report does.
    """

    store: ChunkStore
    records: Sequence[CanonicalRecord | EncodingRecord | PatchRecord]
    losses: Losses
    what: str
    later: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.nbytes for record in self.records)

    def end(self, error: Exception | None) -> None:
        """Note what became of the records. Raises an error that the losses do not bear."""
        unkept, main = self.losses.unkept, self.records[-1]
        if main.kind == "canonical":
            (unkept.discard if error is None else unkept.add)(main.chunk_id)
        try:
            with self.losses.absorb_errors(self.what):
                if error is not None:
                    raise error
        except Exception as unborne:
            if self.later:
                self.losses.note_for_next(f"{self.what}: {type(unborne).__name__}: {unborne}")
            raise
        finally:
            self._stop_waiting()

    def drop(self, why: str) -> None:
        """Leave a note that the records will not be put, and why."""
        self._stop_waiting()
        self.losses.note_for_next(f"{self.what}: {why}")

    def _stop_waiting(self) -> None:
        main, waiting = self.records[-1], waiting_records(self.store)
        if not isinstance(main, PatchRecord):
            there = waiting.anchors if main.kind == "anchor" else waiting.chunks
            there.pop((main.context, main.chunk_id), None)


def put_owed(owed: Sequence[Owed]) -> None:
    """Put the records, those of one store together.

    Each is brought to its `end`; then the first error that one of them raised is raised.
    """
    failed: list[Exception] = []
    for store in {id(one.store): one.store for one in owed}.values():
        mine = [one for one in owed if one.store is store]
        records = [record for one in mine for record in one.records]
        try:
            errors = [put.error for put in store.put_many(records)]
        except Exception as error:  # whoever waits for it must be told
            errors = [error] * len(records)
        for one in mine:
            own, errors = errors[: len(one.records)], errors[len(one.records) :]
            try:
                one.end(next((error for error in own if error is not None), None))
            except Exception as error:
                failed.append(error)
    if failed:
        raise failed[0]


LIMIT = 1 << 30
"""Bytes of KV that a backbone's background work holds, at most."""

_DEVICES = ("cpu", "cuda", "xpu", "mps")
_TOGETHER = 64 << 20  # bytes of records that wait for others to be put with them


@dataclass(frozen=True, eq=False)
class Ready(Generic[Made_co]):
    """What background work has made for a call that may come, and the bytes that are held for it."""

    made: Made_co
    nbytes: int


Work = Callable[[], Sequence[Owed] | Ready[object] | None]
"""Does a piece of background work, and returns what it made: to be stored, or to be taken by a call."""
Told = Callable[[str], None]
"""Is told why a piece of background work was dropped, or failed."""


class Priority(IntEnum):
    """What is lost with a piece of background work, the least first.

    A guess costs the next turn what it would have cost without; an audit is made of another slot; a patch is
    formed when its antecedents come back once more; a chunk that left would have to be encoded and prefilled.
    """

    GUESS = 0
    AUDIT = 1
    PATCH = 2
    CHUNK = 3


@dataclass(eq=False)
class BackgroundPiece:
    """A piece of background work; ``held`` are the bytes of the memory it holds, by address.

    ``work`` is forgotten, with all that it refers to, where it has ``made`` something ready or is not wanted.
    What it made counts among what is held until the piece is cancelled. ``reads`` are the ids of the chunks
    whose records it looks for in a store; None: of any. A call that needs what it makes waits for its
    ``name`` (`Background.flush_named`).
    """

    work: Work
    priority: Priority
    held: dict[int, int]
    dropped: Told
    accounts: tuple[Account, ...] = ()
    name: Hashable = None
    blocks: tuple[torch.UntypedStorage, ...] = ()
    reads: Collection[str] | None = None
    unwanted: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    fingerprint: str = ""
    made: object = None

    def forget(self) -> None:
        """Say that nobody wants it: for finalisers, which must not wait for a lock."""
        self.unwanted, self.made, self.work = True, None, _nothing


class Background:
    """The queue of one backbone. Safe to use from several threads.

    Work counts on the accounts of the call that queues it, and runs under the autocast of that call, which
    decides what the model computes; it runs no forward once the model is another than it was then. After a
    process fork it stays with the parent. Without a ``backbone`` nothing counts, and calls do not go first.
    The queue holds at most ``limit`` bytes; if single pieces are larger, the one in progress and one more.
    ``dropped`` counts the pieces that were dropped.
    """

    def __init__(self, backbone: Engine | None = None, limit: int = LIMIT) -> None:
        if limit < 1:
            raise ValueError(f"limit {limit} must be at least 1 byte")
        self.limit = limit
        self.dropped = 0
        self._backbone = (lambda: None) if backbone is None else weakref.ref(backbone)
        self._reset()
        forks.call_in_child(self, Background._reset)

    def _reset(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kamera-later")
        self._changed = threading.Condition()
        self._waiting: deque[BackgroundPiece] = deque()
        self._ready: list[BackgroundPiece] = []
        self._owed: list[tuple[BackgroundPiece, list[Owed]]] = []
        self._putting = threading.Lock()
        self._running = 0
        self._held: dict[int, list[int]] = {}  # bytes at an address, and how many pieces hold them
        self._named: Counter[Hashable] = Counter()  # pieces in progress, by name
        self._hurried = False  # a call waits for what a piece owes
        self._worker: int | None = None

    def add(
        self,
        work: Work,
        priority: Priority = Priority.CHUNK,
        holds: Iterable[torch.Tensor] = (),
        dropped: Told = logger.warning,
        name: Hashable = None,
        reads: Collection[str] | None = None,
    ) -> BackgroundPiece:
        """Do ``work`` later, unless it is dropped; returns at once. An error in it is logged.

        What it returns is put, together with what the pieces next to it return; ``reads`` as in
        `BackgroundPiece`: such records are put before. ``holds`` are the tensors that it keeps in memory: a
        block counts once, however many pieces share it. ``dropped`` is told if the work is dropped, or fails.
        """
        blocks = {block.data_ptr(): block for tensor in holds if (block := tensor.untyped_storage()).nbytes()}
        held = {address: block.nbytes() for address, block in blocks.items()}
        # it keeps the blocks: a freed one's address may become another's
        piece = BackgroundPiece(
            work, priority, held, dropped, open_accounts(), name, tuple(blocks.values()), reads
        )
        backbone = self._backbone()
        piece.autocast, piece.fingerprint = _autocast(), "" if backbone is None else backbone.fingerprint
        with self._changed:
            self._waiting.append(piece)
            self._hold(piece)
            gone = self._drop_excess()
        self._report_dropped(gone)
        self._pool.submit(self._next)
        return piece

    def cancel(self, piece: BackgroundPiece) -> None:
        """Drop a piece that nobody wants any more, silently; one in progress ends at its next layer."""
        piece.forget()
        with self._changed:
            self._prune()
        backbone = self._backbone()
        if backbone is not None:
            calls_of(backbone).wake_later_work()

    def busy(self, name: Hashable) -> bool:
        """True while a piece of this name waits, runs, or is owed to a store."""
        return self._named[name] > 0

    def flush_named(self, name: Hashable) -> None:
        """Wait for the pieces of this name, which go first. Within background work nothing is waited for."""
        if not self._named[name] or self.is_own_thread:
            return
        with self._changed:  # they go first, and what they make is put at once
            first = [piece for piece in self._waiting if piece.name == name]
            rest = [piece for piece in self._waiting if piece.name != name]
            self._waiting = deque([*first, *rest])
            self._hurried = True
            owed = any(piece.name == name for piece, _ in self._owed)
        if owed:
            self._put_owed()
        with self.hurry(), self._changed:
            self._changed.wait_for(lambda: not self.busy(name))

    @property
    def is_own_thread(self) -> bool:
        """True in the thread that does the work: it must not wait for any."""
        return self._worker == threading.get_ident()

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds now."""
        with self._changed:
            self._prune()
            return self._bytes

    def flush(self) -> None:
        """Wait until all work is done, and what that handed over in turn."""
        with self.hurry(), self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._running or self._owed))

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Context of a thread that waits for background work, which gives way to no call meanwhile."""
        backbone = self._backbone()
        with nullcontext() if backbone is None else calls_of(backbone).hurry():
            yield

    # -- inside --------------------------------------------------------------------------------

    def _next(self) -> None:
        self._worker = threading.get_ident()
        with self._changed:
            piece = self._waiting.popleft() if self._waiting else None  # it may have been dropped
            self._running += 1
            due = piece is not None and any(_is_read(piece, owed) for _, owed in self._owed)
        if due:
            self._put_owed()
        done = [] if piece is None else self._run_piece(piece)
        gone: list[BackgroundPiece] = []
        with self._changed:
            if piece is not None and done and not isinstance(done, Ready):
                self._owed.append((piece, done))
            elif piece is not None:
                self._release_piece(piece)
                gone = self._hold_ready(piece, done) if isinstance(done, Ready) else []
            size = sum(one.nbytes for _, some in self._owed for one in some)
            due = self._hurried or not self._waiting or size > _TOGETHER
        self._report_dropped(gone)
        if due:
            self._put_owed()
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _hold_ready(self, piece: BackgroundPiece, ready: Ready[object]) -> list[BackgroundPiece]:
        """Count what was made until it is taken; returns the pieces that are dropped for it."""
        piece.work, piece.blocks = _nothing, ()
        piece.made, piece.name = ready.made, None
        piece.held = {id(piece): ready.nbytes}  # no block of memory in use has the address of another object
        self._ready.append(piece)
        self._hold(piece)
        return self._drop_excess()

    def _run_piece(self, piece: BackgroundPiece) -> list[Owed] | Ready[object]:
        """Do a piece of work; return what it made."""
        try:
            with self._as_later(piece):
                made = None if piece.unwanted else piece.work()
                return made if isinstance(made, Ready) else [*(made or ())]
        except WorkCancelled:
            pass
        except BaseException as error:  # no error may be lost with the thread
            logger.error("background work failed: %s", error)
            piece.dropped(f"{type(error).__name__}: {error}")
        return []

    def _put_owed(self) -> None:
        """Put all that is owed; afterwards it is, whoever put it."""
        with self._putting:
            with self._changed:
                owed, self._owed, self._hurried = self._owed, [], False
                self._running += 1
            try:
                put_owed([one for _, some in owed for one in some])
            except Exception as error:
                logger.error("background work failed: %s", error)
            finally:
                with self._changed:
                    self._running -= 1
                    for piece, _ in owed:
                        self._release_piece(piece)
                    self._changed.notify_all()

    @contextmanager
    def _as_later(self, piece: BackgroundPiece) -> Iterator[None]:
        backbone = self._backbone()
        if backbone is None:
            yield
            return
        later = count_as_later(backbone, piece.accounts, lambda: piece.unwanted, piece.fingerprint)
        with later, ExitStack() as held:
            for device, dtype in piece.autocast:
                held.enter_context(torch.autocast(device, dtype))
            calls_of(backbone).give_way()
            yield

    @property
    def _bytes(self) -> int:
        return sum(size for size, _ in self._held.values())

    def _hold(self, piece: BackgroundPiece) -> None:
        self._named.update(() if piece.name is None else (piece.name,))
        for address, size in piece.held.items():
            self._held.setdefault(address, [size, 0])[1] += 1

    def _release_piece(self, piece: BackgroundPiece) -> None:
        self._named -= Counter(() if piece.name is None else (piece.name,))  # drops the entry at zero
        for address in piece.held:
            there = self._held[address]
            there[1] -= 1
            if not there[1]:
                del self._held[address]

    def _prune(self) -> None:
        for pieces in (self._waiting, self._ready):
            for piece in [piece for piece in pieces if piece.unwanted]:
                pieces.remove(piece)
                self._release_piece(piece)
        self._changed.notify_all()

    def _drop_excess(self) -> list[BackgroundPiece]:
        """Drop the least priority first, of equals the oldest, until the rest is within the limit or one.

        Work in progress goes on.
        """
        gone: list[BackgroundPiece] = []
        self._prune()
        while self._bytes > self.limit and len(self._waiting) + len(self._ready) > 1:
            piece = min((*self._ready, *self._waiting), key=attrgetter("priority"))
            (self._waiting if piece in self._waiting else self._ready).remove(piece)
            self._release_piece(piece)
            gone.append(piece)
        self.dropped += len(gone)
        self._changed.notify_all()
        return gone

    def _report_dropped(self, gone: Iterable[BackgroundPiece]) -> None:
        for piece in gone:
            piece.forget()
            piece.dropped(f"background work held more than its {self.limit} bytes")


def _nothing() -> None:
    """The work of a piece that has none left."""


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocast of this thread, by type of device."""
    on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    return tuple((device, torch.get_autocast_dtype(device)) for device in on)


def _is_read(piece: BackgroundPiece, owed: Sequence[Owed]) -> bool:
    """True if a piece looks for one of these records, or may."""
    records = (record for one in owed for record in one.records)
    return any(piece.reads is None or record.chunk_id in piece.reads for record in records)


_queues: weakref.WeakKeyDictionary[Engine, Background] = weakref.WeakKeyDictionary()
_making = forks.Lock()


def background_of(backbone: Engine) -> Background:
    """The queue of a backbone: one for all its windows in this process."""
    with _making:
        queue = _queues.get(backbone)
        if queue is None:
            queue = _queues[backbone] = Background(backbone)
        return queue


class Ahead(Generic[Made]):
    """One thing that is prepared for the next request of its owner alone. Thread-safe.

    What is prepared for all owners on a backbone counts towards the memory of its background work, which
    drops it first. Nothing is prepared for an owner that is gone.
    """

    def __init__(self, engine: Engine) -> None:
        self._queue = background_of(engine)
        self._lock = forks.Lock()
        self._pieces: list[BackgroundPiece] = []  # the last one, until it is taken
        weakref.finalize(self, _forget, self._pieces)

    def begin(self, make: Callable[[], Ready[Made] | None]) -> None:
        """Make something ahead, as background work; what was made before is dropped.

        ``make`` must not hold the owner.
        """
        with self._lock:
            self._take()
            self._pieces.append(self._queue.add(make, Priority.GUESS, dropped=logger.info))

    def take(self) -> Made | None:
        """What was made, which is given once; None if nothing was, or not yet. Work on it ends."""
        with self._lock:
            return self._take()

    def _take(self) -> Made | None:
        if not self._pieces:
            return None
        piece = self._pieces.pop()
        made = cast("Made | None", piece.made)
        self._queue.cancel(piece)
        return made


def _forget(pieces: Sequence[BackgroundPiece]) -> None:
    for piece in pieces:
        piece.forget()
