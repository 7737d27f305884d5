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
from typing import Literal

from kamera import forks
from kamera.errors import KameraError, RemoteUnavailable
from kamera.store.remote.blobs import BlobHead, Blobs

logger = logging.getLogger(__name__)

FAILURES = 2
"""Consecutive failed calls after which the remote is not called."""
COOLDOWN = 15.0
"""Seconds without calls; then one call probes the remote."""

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Circuit breaker. ``closed``: calls may be made; ``open``: none; ``half-open``: one, which decides.

    ``clock`` returns seconds. Safe to use from several threads.
    """

    def __init__(
        self,
        failures: int = FAILURES,
        cooldown: float = COOLDOWN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._cooldown = cooldown
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = 0
        self._opened = 0.0
        self._probing = False

    @property
    def state(self) -> State:
        """The present state."""
        with self._lock:
            return self._state()

    def allow(self) -> bool:
        """True if the call may be made; its caller must report `success` or `failure` afterwards."""
        with self._lock:
            state = self._state()
            if state == "half-open" and not self._probing:
                self._probing = True
                return True
            return state == "closed"

    def success(self) -> None:
        """Report that the remote answered."""
        with self._lock:
            self._failed = 0
            self._probing = False

    def failure(self) -> None:
        """Report that the remote did not answer."""
        with self._lock:
            self._failed += 1
            self._probing = False
            self._opened = self._clock()

    def _state(self) -> State:
        if self._failed < self._limit:
            return "closed"
        return "half-open" if self._clock() - self._opened >= self._cooldown else "open"


class Guard:
    """Blobs whose failures are all raised as `RemoteUnavailable`; a remote that is down costs no time.

    Reading and writing have a breaker each: a remote without room or permission to write still
    serves its objects.
    """

    def __init__(self, blobs: Blobs, reads: Breaker, writes: Breaker) -> None:
        self.url = blobs.url
        self.errors: tuple[type[Exception], ...] = (RemoteUnavailable,)
        self.reads = _Calls(blobs, "reads", reads)
        self.writes = _Calls(blobs, "writes", writes)
        self._blobs = blobs
        forks.bind(self, _in_child)

    def get(self, name: str) -> bytes | None:
        """See `Blobs`."""
        with self.reads.call():
            return self._blobs.get(name)

    def heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """See `Blobs`."""
        with self.reads.call():
            return self._blobs.heads(names, length)

    def put(self, name: str, data: bytes) -> None:
        """See `Blobs`."""
        with self.writes.call():
            self._blobs.put(name, data)

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        """See `Blobs`."""
        with self.writes.call():
            return self._blobs.replace(name, data, expected)

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """See `Blobs`."""
        with self.reads.call():
            return self._blobs.marks(folder)

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`."""
        with self.writes.call():
            self._blobs.delete(names)

    def close(self) -> None:
        """See `Blobs`."""
        self._blobs.close()


class _Calls:
    """The calls of one kind: their breaker, their counters, and the last error."""

    def __init__(self, blobs: Blobs, kind: str, breaker: Breaker) -> None:
        self.breaker = breaker
        self.counts: Counter[str] = Counter()
        """``calls``, ``failures``, and ``skipped``: calls not made because the breaker was open."""
        self.last_error = ""
        self._blobs = blobs
        self._kind = kind
        self._lock = threading.Lock()
        self._down = False

    @property
    def state(self) -> str:
        """State of the breaker, or ``failing``: it is still closed, but the last call failed."""
        state = self.breaker.state
        return "failing" if state == "closed" and self._down else state

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One call inside, counted. `RemoteUnavailable` if it fails, or where none is to be made."""
        if not self.breaker.allow():
            self._count("skipped")
            raise RemoteUnavailable(f"{self._blobs.url} is left alone for a while: {self.last_error}")
        self._count("calls")
        try:
            yield
        except self._blobs.errors as error:
            self.breaker.failure()
            raise RemoteUnavailable(f"{self._blobs.url} fails {self._kind}: {self._failed(error)}") from error
        except KameraError:  # an operation this kind of remote cannot do: not an outage
            self.breaker.success()
            raise
        except BaseException:
            self.breaker.failure()  # a probe must not stay under way for ever
            raise
        self.breaker.success()
        self._recovered()

    def _failed(self, error: Exception) -> str:
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        with self._lock:
            self.counts["failures"] += 1
            self.last_error = text
            news, self._down = not self._down, True
        if news:
            logger.warning(
                "remote %s fails %s (%s): objects only it has are misses, uploads wait",
                self._blobs.url,
                self._kind,
                text,
            )
        return text

    def _recovered(self) -> None:
        with self._lock:
            news, self._down = self._down, False
        if news:
            logger.warning("remote %s serves %s again", self._blobs.url, self._kind)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _in_child(guard: Guard) -> None:
    forks.refuse(guard, "reads", "writes", "_blobs")
