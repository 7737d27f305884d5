"""One call at a time per name: a caller waits for a fetch already in progress and shares its result."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Generic, NamedTuple, TypeVar

Result = TypeVar("Result")


class _Flight(NamedTuple, Generic[Result]):
    landing: Future[Result]
    shared: bool


class Flights(Generic[Result]):
    """Calls in progress, by name. A thread must not start a second call from inside the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._up: dict[str, _Flight[Result]] = {}

    def share(self, name: str, work: Callable[[], Result]) -> Result:
        """The result or error of ``work``, which is called once for all callers while it is in progress."""
        mine: _Flight[Result] = _Flight(Future(), shared=True)
        while (other := self._take_off(name, mine)) is not mine:
            if other.shared:
                return other.landing.result()
            wait([other.landing])
        try:
            result = work()
        except BaseException as error:
            self._land(name)
            mine.landing.set_exception(error)
            raise
        self._land(name)
        mine.landing.set_result(result)
        return result

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Inside, no other call is in progress for ``name``."""
        mine: _Flight[Result] = _Flight(Future(), shared=False)
        while (other := self._take_off(name, mine)) is not mine:
            wait([other.landing])
        try:
            yield
        finally:
            self._land(name)
            mine.landing.cancel()
            mine.landing.set_running_or_notify_cancel()

    def _take_off(self, name: str, mine: _Flight[Result]) -> _Flight[Result]:
        with self._lock:
            return self._up.setdefault(name, mine)

    def _land(self, name: str) -> None:
        with self._lock:
            del self._up[name]
