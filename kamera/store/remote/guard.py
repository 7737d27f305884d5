"""Protection of a store from a remote that is down, slow or out of room: a circuit breaker, and counters.

Time-outs and retries are the drivers' (their libraries have them). This module stops calls to a remote
that does not answer, tries it again after a while, and logs that once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from kamera import forks
from kamera.errors import KameraError, RemoteUnavailable
from kamera.store.remote.blobs import BlobHead, Blobs

logger = logging.getLogger(__name__)

FAILURES = 2
"""Consecutive failed calls after which the remote is not called."""
COOLDOWN = 15.0
"""Seconds without calls; then one call probes the remote."""


class Breaker:
    """Circuit breaker of the calls of one ``kind``, with their counters and the last error.

    ``state`` is ``closed`` (calls may be made), ``failing`` (so they may, but the last one failed), ``open``
    (none may) or ``half-open`` (one may, which decides). ``clock`` returns seconds. Safe to use from several
    threads.
    """

    def __init__(
        self,
        kind: str,
        cooldown: float = COOLDOWN,
        failures: int = FAILURES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """``calls``, ``failures``, and ``skipped``: calls not made because the breaker was open."""
        self.last_error = ""
        self._kind = kind
        self._limit = failures
        self._cooldown = cooldown
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opening_time = 0.0
        self._probing = self._down = False

    @property
    def state(self) -> str:
        """The present state."""
        with self._lock:
            return self._state()

    def allow(self) -> bool:
        """True if the call may be made; its caller must `report_success` or `report_failure` afterwards."""
        with self._lock:
            state = self._state()
            is_allowed = state in ("closed", "failing") or (state == "half-open" and not self._probing)
            self._probing = self._probing or (is_allowed and state == "half-open")
            self.counts["calls" if is_allowed else "skipped"] += 1
            return is_allowed

    def report_success(self, url: str = "") -> None:
        """Report that the remote answered, at ``url`` if it did what was asked."""
        with self._lock:
            self._failures, self._probing = 0, False
            news, self._down = self._down and bool(url), self._down and not url
        if news:
            logger.warning("remote %s serves %s again", url, self._kind)

    def report_failure(self, url: str = "", error: Exception | None = None) -> None:
        """Report that the remote did not answer; with ``error`` it is counted, and logged once."""
        with self._lock:
            self._failures, self._probing, self._opening_time = self._failures + 1, False, self._clock()
            if error is None:
                return
            self.counts["failures"] += 1
            self.last_error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            news, self._down = not self._down, True
        if news:
            logger.warning(
                "remote %s fails %s (%s): objects only it has are misses, uploads wait",
                url,
                self._kind,
                self.last_error,
            )

    @contextlib.contextmanager
    def call(self, blobs: Blobs) -> Iterator[None]:
        """One call to ``blobs`` inside. `RemoteUnavailable` if it fails, or where none is to be made."""
        if not self.allow():
            raise RemoteUnavailable(f"{blobs.url} is left alone for a while: {self.last_error}")
        try:
            yield
        except blobs.errors as error:
            self.report_failure(blobs.url, error)
            raise RemoteUnavailable(f"{blobs.url} fails {self._kind}: {self.last_error}") from error
        except KameraError:  # an operation this kind of remote cannot do: not an outage
            self.report_success()
            raise
        except BaseException:
            self.report_failure()  # a probe must not stay under way for ever
            raise
        self.report_success(blobs.url)

    def _state(self) -> str:
        if self._failures < self._limit:
            return "failing" if self._down else "closed"
        return "half-open" if self._clock() - self._opening_time >= self._cooldown else "open"


class Guard:
    """Blobs whose failures are all `RemoteUnavailable`; reading and writing have a breaker each."""

    def __init__(self, blobs: Blobs, reads: Breaker, writes: Breaker) -> None:
        self.url = blobs.url
        self.errors: tuple[type[Exception], ...] = (RemoteUnavailable,)
        self.reads = reads
        self.writes = writes
        self._blobs = blobs
        forks.call_in_child(self, _in_child)

    def get(self, name: str) -> bytes | None:
        with self.reads.call(self._blobs):
            return self._blobs.get(name)

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        with self.reads.call(self._blobs):
            return self._blobs.read_heads(names, length)

    def put(self, name: str, data: bytes) -> None:
        with self.writes.call(self._blobs):
            self._blobs.put(name, data)

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        with self.writes.call(self._blobs):
            return self._blobs.replace(name, data, expected)

    def marks(self, folder: str) -> Mapping[str, str | None]:
        with self.reads.call(self._blobs):
            return self._blobs.marks(folder)

    def delete(self, names: Sequence[str]) -> None:
        with self.writes.call(self._blobs):
            self._blobs.delete(names)

    def close(self) -> None:
        self._blobs.close()


def _in_child(guard: Guard) -> None:
    forks.make_unusable(guard, "reads", "writes", "_blobs")
