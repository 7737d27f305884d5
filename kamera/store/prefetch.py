"""Objects brought nearer before they are asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kamera.errors import KameraError
from kamera.store import forks

logger = logging.getLogger(__name__)

WORKERS = 4
BOUND = 256
"""Most objects that wait at a time; what is asked for beyond is not prefetched."""


class Prefetch:
    """Look-ups under way. Forgetting it cancels nothing."""

    def __init__(self) -> None:
        self.skipped = 0
        """How many were not taken on because too many waited."""
        self.cancelled = False
        self._started: list[Future[bool]] = []
        forks.bind(self, lambda prefetch: forks.refuse(prefetch, "_started"))

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all are done within ``timeout`` seconds (None: wait for them)."""
        return not wait(list(self._started), timeout).not_done

    def cancel(self) -> None:
        """Do not begin what has not begun."""
        self.cancelled = True

    @property
    def found(self) -> int:
        """How many of those that are done are at hand now."""
        return sum(future.result() for future in self._started if future.done())


class Prefetcher:
    """A few threads that ``fetch`` by name; it says whether there was such an object."""

    def __init__(self, fetch: Callable[[str], bool]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._closed = False

    def start(self, names: Iterable[str]) -> Prefetch:
        """Begin to fetch ``names``, as many as may wait; returns at once."""
        wanted = list(dict.fromkeys(names))
        prefetch = Prefetch()
        with self._lock:
            taken = [] if self._closed else wanted[: max(0, BOUND - self._waiting)]
            self._waiting += len(taken)
            if self._pool is None and taken:
                self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="kamera-prefetch")
            if self._pool is not None:
                prefetch._started += [self._pool.submit(self._one, name, prefetch) for name in taken]
        prefetch.skipped = len(wanted) - len(taken)
        return prefetch

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown()

    def _one(self, name: str, prefetch: Prefetch) -> bool:
        try:
            # not by cancelling futures: who waits for one in another thread would not be woken
            return not (self._closed or prefetch.cancelled) and self._fetch(name)
        except KameraError as error:  # whoever asks for the object itself is told again
            logger.debug("not prefetched: %s", error)
            return False
        finally:
            with self._lock:
                self._waiting -= 1
