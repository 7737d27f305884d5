"""The account of model work: what ran before answers (now), and what ran after them (in the background)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import add
from typing import NamedTuple

from kamera import forks
from kamera.engines.base import Engine
from kamera.engines.precedence import calls_of, mark_as_later, never
from kamera.engines.values import Work


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

        Work that is handed over inside (`open_accounts`) is later work of this account. Later work of all
        accounts gives way to the call.
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
        """Count later work."""
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
    """Context of later work, which ``accounts`` bear, and what it hands over in turn.

    It gives way to calls, and ends (Cancelled) once it is ``unwanted()``; ``fingerprint`` as in
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
