"""Calls go before later work, which stops while one is in progress; and a call ends if nobody wants it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kamera import forks

PATIENCE = 1.0
"""Seconds that later work gives way at one place: it may hold what the call in progress waits for."""


class WorkCancelled(Exception):
    """Ends work whose result nobody wants any more."""


class Calls:
    """The calls in progress on one engine, and the threads that wait for its later work. Thread-safe."""

    def __init__(self) -> None:
        self._reset()
        forks.call_in_child(self, Calls._reset)

    def _reset(self) -> None:
        self._change = threading.Condition()
        self._open = 0
        self._waiters = 0

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Context of a call: later work gives way until its end. A call of later work's own is none."""
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
        """Context of a thread that waits for later work, which gives way to nobody meanwhile."""
        with self._change:
            self._waiters += 1
            self._change.notify_all()
        try:
            yield
        finally:
            with self._change:
                self._waiters = max(0, self._waiters - 1)

    def wake_later_work(self) -> None:
        """Wake later work that gives way: it may have been cancelled."""
        with self._change:
            self._change.notify_all()

    @property
    def must_give_way(self) -> bool:
        """True in later work while a call goes first, or once the work is cancelled."""
        unwanted = _working.get()
        return unwanted is not None and (self._go_first or unwanted())

    def give_way(self) -> None:
        """In later work, wait until no call is in progress, or for `PATIENCE`; elsewhere do nothing.

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
    """False: of later work that nobody cancels."""
    return False


def is_later() -> bool:
    """True in a thread that does later work."""
    return _working.get() is not None


@contextmanager
def mark_as_later(unwanted: Callable[[], bool], fingerprint: str = "") -> Iterator[None]:
    """Context of later work, which ends at the next `Calls.give_way` once it is ``unwanted()``.

    It was handed over under ``fingerprint``: an engine runs no forward in it as another model.
    """
    tokens = _working.set(unwanted), _fingerprint.set(fingerprint)
    try:
        yield
    finally:
        _working.reset(tokens[0])
        _fingerprint.reset(tokens[1])


def expected_fingerprint() -> str:
    """The fingerprint under which the later work of this thread was handed over; "" in a call."""
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

    Later work has its own end (`Calls.give_way`).
    """
    unwanted = _unwanted.get()
    if unwanted is not None and not is_later() and unwanted():
        raise WorkCancelled("nobody waits for this call any more")
