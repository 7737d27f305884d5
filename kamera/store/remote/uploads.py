"""Write-back: objects stored locally that still have to reach the remote."""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable

from kamera.errors import CorruptChunk, RemoteUnavailable

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds


class Uploads:
    """Names of waiting objects, and one thread that sends them. Safe to use from several threads.

    ``send`` uploads one object and raises `RemoteUnavailable` on failure: then the object keeps waiting,
    and the thread pauses for a random time below a bound that doubles (full jitter). The thread starts with
    the first name.
    """

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._versions: OrderedDict[str, int] = OrderedDict()  # to the count of its last adding
        self._last_version = self._failures = 0
        self._failed_in_a_row = 0
        self._hurry = self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, name: str) -> None:
        """Send ``name``; if it is being sent now, send it again."""
        with self._changed:
            self._last_version += 1
            self._versions[name] = self._last_version
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="kamera-uploads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def discard(self, name: str) -> None:
        """Drop ``name`` from the waiting names."""
        with self._changed:
            self._versions.pop(name, None)
            self._changed.notify_all()

    def __contains__(self, name: object) -> bool:
        """True if the object ``name`` still has to reach the remote."""
        return name in self._versions

    def names(self) -> tuple[str, ...]:
        """Names of the objects that still have to reach the remote."""
        with self._changed:
            return tuple(self._versions)

    def flush(self, timeout: float | None, *, patient: bool = True) -> tuple[str, ...]:
        """Send what waits; return what is left after ``timeout`` seconds, or a failure unless ``patient``."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            old_failures = self._failures
            self._changed.wait_for(
                lambda: not self._versions or not (patient or self._failures == old_failures), timeout
            )
            return tuple(self._versions)

    def close(self) -> None:
        """Stop sending, after the object under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            name, version = work
            try:
                self._send(name)
            except CorruptChunk as error:  # damaged here and quarantined: there is nothing to send
                logger.warning("not uploaded: %s", error)
                self._end(name, version)
            except RemoteUnavailable:
                self._pause(name, version)
            except Exception:  # the thread must survive: other objects wait behind this one
                logger.exception("upload of %s failed", name)
                self._pause(name, version)
            else:
                self._failed_in_a_row = 0
                self._end(name, version)

    def _next(self) -> tuple[str, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._versions or self._closing)
            return None if self._closing else next(iter(self._versions.items()))

    def _end(self, name: str, version: int) -> None:
        with self._changed:
            if self._versions.get(name) == version:
                del self._versions[name]
            self._changed.notify_all()

    def _pause(self, name: str, version: int) -> None:
        self._failed_in_a_row += 1
        bound = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._failed_in_a_row)
        with self._changed:
            self._failures += 1
            if self._versions.get(name) == version:
                self._versions.move_to_end(name)  # a refused object must not block the others
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._hurry or self._closing, random.uniform(0, bound))
            self._hurry = False
