"""One call at a time for each name."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator


class Flights:
    """Locks by name, each there as long as somebody wants it. A thread must not take one that it has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._users: Counter[str] = Counter()

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Inside, no other call is in progress for ``name``."""
        with self._lock:
            mine = self._locks.setdefault(name, threading.Lock())
            self._users[name] += 1
        try:
            with mine:
                yield
        finally:
            with self._lock:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name], self._locks[name]
