"""Later work: what no answer waits for, done one piece after another in one thread of a backbone."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from kamera import forks
from kamera.engines import Engine, later, open_accounts

LIMIT = 8
"""Maximum of pieces that wait: each may hold the KV of a window."""

logger = logging.getLogger(__name__)


class Later:
    """The queue of one backbone. Safe to use from several threads.

    Work is borne by the accounts of the call that hands it over. A process fork leaves it to the parent.
    Without a ``backbone`` nothing is counted.
    """

    def __init__(self, backbone: Engine | None = None, limit: int = LIMIT) -> None:
        self._backbone = (lambda: None) if backbone is None else weakref.ref(backbone)
        self._limit = limit
        self._begin()
        forks.bind(self, Later._begin)

    def _begin(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kamera-later")
        self._changed = threading.Condition()
        self._pending = 0
        self._worker: int | None = None

    def offer(self, work: Callable[[], None]) -> bool:
        """`add` work that may be dropped; False if too much waits, and it is."""
        with self._changed:
            if self._pending >= self._limit:
                return False
            self.add(work)
        return True

    def add(self, work: Callable[[], None]) -> None:
        """Do ``work`` later. An error in it is logged."""
        accounts = open_accounts()

        def borne() -> None:
            self._worker = threading.get_ident()
            try:
                backbone = self._backbone()
                with nullcontext() if backbone is None else later(backbone, accounts):
                    work()
            except BaseException as error:  # no error may be lost with the thread
                logger.error("later work failed: %s", error)
            finally:
                with self._changed:
                    self._pending -= 1
                    self._changed.notify_all()

        with self._changed:
            self._pending += 1
            self._pool.submit(borne)

    @property
    def mine(self) -> bool:
        """True in the thread that does the work: it must not wait for any."""
        return self._worker == threading.get_ident()

    def flush(self) -> None:
        """Wait until all work is done, and what that handed over in turn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)


_queues: weakref.WeakKeyDictionary[Engine, Later] = weakref.WeakKeyDictionary()
_making = forks.Lock()


def later_of(backbone: Engine) -> Later:
    """The queue of a backbone: one for all its windows in this process."""
    with _making:
        queue = _queues.get(backbone)
        if queue is None:
            queue = _queues[backbone] = Later(backbone)
        return queue
