"""Whose turn it is on an engine, and who bears the cost.

Calls go before background work, which stops while one is in progress; a call ends if nobody wants it.
Accounts count the work of both.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import add
from typing import Any, NamedTuple

from kamera import forks
from kamera.engines.base import Engine, Work

PATIENCE = 1.0
"""Seconds that background work gives way at one place: it may hold what the call in progress waits for."""


class WorkCancelled(Exception):
    """Ends work whose result nobody wants any more."""


class Calls:
    """The calls in progress on one engine, and the threads that wait for its background work. Thread-safe."""

    def __init__(self) -> None:
        self._reset()
        forks.call_in_child(self, Calls._reset)

    def _reset(self) -> None:
        self._change = threading.Condition()
        self._open = 0
        self._waiters = 0

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Context of a call: background work, whose own calls are none, gives way until its end."""
        if is_later():
            yield
            return
        with self._change:
            self._open += 1
        try:
            yield
        finally:
            with self._change:
                self._open = max(0, self._open - 1)  # 0 in a child that was forked inside
                self._change.notify_all()

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Context of a thread that waits for background work, which gives way to nobody meanwhile."""
        with self._change:
            self._waiters += 1
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._waiters = max(0, self._waiters - 1)

    def wake_later_work(self) -> None:
        """Wake background work that gives way: it may have been cancelled."""
        with self._change:
            self._change.notify_all()

    @property
    def must_give_way(self) -> bool:
        """True in background work while a call goes first, or once the work is cancelled."""
        unwanted = _working.get()
        return unwanted is not None and (self._go_first or unwanted())

    def give_way(self) -> None:
        """In background work, wait until no call is in progress, or for `PATIENCE`; elsewhere do nothing.

        Engines call it before each forward, and between the parts of one that may be interrupted. No lock may
        be held that a call could need. Raises WorkCancelled.
        """
        unwanted = _working.get()
        if unwanted is None:
            return
        with self._change:
            self._change.wait_for(lambda: unwanted() or not self._go_first, PATIENCE)
        if unwanted():
            raise WorkCancelled

    @property
    def _go_first(self) -> bool:
        return self._open > 0 and not self._waiters


_calls_by_engine: weakref.WeakKeyDictionary[Any, Calls] = weakref.WeakKeyDictionary()
_making = forks.Lock()
_working: ContextVar[Callable[[], bool] | None] = ContextVar("kamera_later_work", default=None)
_fingerprint: ContextVar[str] = ContextVar("kamera_later_fingerprint", default="")


def calls_of(engine: Any) -> Calls:
    """The calls on an engine, of all threads."""
    with _making:
        try:
            calls = _calls_by_engine.get(engine)
        except TypeError:  # not hashable: nobody else can ask for it
            return Calls()
        if calls is None:
            calls = _calls_by_engine[engine] = Calls()
        return calls


def never() -> bool:
    """False: of background work that nobody cancels."""
    return False


def is_later() -> bool:
    """True in a thread that does background work."""
    return _working.get() is not None


@contextmanager
def mark_as_later(unwanted: Callable[[], bool], fingerprint: str = "") -> Iterator[None]:
    """Context of background work, which ends at the next `Calls.give_way` once it is ``unwanted()``.

    It was handed over under ``fingerprint``: an engine runs no forward in it as another model.
    """
    tokens = _working.set(unwanted), _fingerprint.set(fingerprint)
    try:
        yield
    finally:
        _working.reset(tokens[0])
        _fingerprint.reset(tokens[1])


def expected_fingerprint() -> str:
    """The fingerprint under which the background work of this thread was handed over; "" in a call."""
    return _fingerprint.get()


_unwanted: ContextVar[Callable[[], bool] | None] = ContextVar("kamera_unwanted", default=None)


@contextmanager
def cancel_when(unwanted: Callable[[], bool]) -> Iterator[None]:
    """Context of calls that end once they are ``unwanted()``, which is asked between the layers of a forward.

    A call that ends so raises WorkCancelled, and leaves windows, sessions and the store as an error does.
    What it had handed over for later is done all the same.
    """
    token = _unwanted.set(unwanted)
    try:
        yield
    finally:
        _unwanted.reset(token)


def check_cancelled() -> None:
    """Raise WorkCancelled in a call that is no longer wanted; engines ask it between the parts of their work.

    Background work has its own end (`Calls.give_way`).
    """
    unwanted = _unwanted.get()
    if unwanted is not None and not is_later() and unwanted():
        raise WorkCancelled("nobody waits for this call any more")


class Spent(NamedTuple):
    """Decoder forwards, tokens in them, runs of the vision tower, and seconds."""

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    seconds: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """The sum of both."""
        return Spent(*map(add, self, other))

    def __str__(self) -> str:
        return (
            f"{self.forwards} forwards of {self.tokens} tokens, {self.vision_encodes} vision encodes, "
            f"{self.seconds:.2f} s"
        )


_NOTHING = Spent()


class Usage(NamedTuple):
    """Model work within the calls of an object (``now``), and after them on its behalf (``background``).

    Background work is what no answer waits for: canonicals, patches, prepared windows. It is done after
    `flush`.
    """

    now: Spent = _NOTHING
    background: Spent = _NOTHING

    def plus(self, *, now: Spent = _NOTHING, background: Spent = _NOTHING) -> Usage:
        """The sum with more of either."""
        return Usage(self.now.plus(now), self.background.plus(background))

    def __str__(self) -> str:
        return f"now {self.now}; background {self.background}"


_open: ContextVar[tuple[Account, ...]] = ContextVar("kamera_open_accounts", default=())


class Account:
    """Counts the work of one window, session or pool, of all its threads; equal to hooks on the model."""

    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._usage = Usage()

    @property
    def usage(self) -> Usage:
        """The work so far."""
        return self._usage

    @contextmanager
    def count_now(self, engine: Engine) -> Iterator[None]:
        """Context of a call: its work counts as ``now``. A call within one of the same account adds nothing.

        Work that is handed over inside (`open_accounts`) is background work of this account. Background work
        of all accounts gives way to the call.
        """
        outer = _open.get()
        if self in outer:
            yield
            return
        token, start = _open.set((*outer, self)), time.perf_counter()
        with calls_of(engine).count_call(), engine.measure() as work:
            try:
                yield
            finally:
                _open.reset(token)
                self.add(_cost_since(work, start))

    def add(self, spent: Spent) -> None:
        """Count work of a call, such as another engine's: no hook on this one sees that."""
        with self._lock:
            self._usage = self._usage.plus(now=spent)

    def count_later(self, spent: Spent) -> None:
        """Count background work."""
        with self._lock:
            self._usage = self._usage.plus(background=spent)


def open_accounts() -> tuple[Account, ...]:
    """The accounts of the calls that this thread is in: those that bear what it leaves for later."""
    return _open.get()


@contextmanager
def count_as_later(
    engine: Engine,
    accounts: Sequence[Account],
    unwanted: Callable[[], bool] = never,
    fingerprint: str = "",
) -> Iterator[None]:
    """Context of background work, which ``accounts`` bear, and what it hands over in turn.

    It gives way to calls, and ends (WorkCancelled) once it is ``unwanted()``; ``fingerprint`` as in
    `mark_as_later`.
    """
    start = time.perf_counter()
    token = _open.set(tuple(accounts))
    with mark_as_later(unwanted, fingerprint), engine.measure() as work:
        try:
            yield
        finally:
            _open.reset(token)
            for account in accounts:
                account.count_later(_cost_since(work, start))


def _cost_since(work: Work, start: float) -> Spent:
    return Spent(work.forwards, work.tokens, work.vision_encodes, time.perf_counter() - start)
