"""Mutual exclusion: forwards of one model run one after another."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Exclusive:
    """One re-entrant lock. A process forked while it was held starts with a free one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock for the block."""
        with self._lock:
            yield

    def renew(self) -> None:
        """Release it unconditionally, for a forked child."""
        self._lock = threading.RLock()


_making = threading.Lock()
_known: weakref.WeakKeyDictionary[Any, Exclusive] = weakref.WeakKeyDictionary()


def exclusive_of(thing: Any) -> Exclusive:
    """The lock of a model or a processor, shared by all of its backbones."""
    with _making:
        try:
            return _known.setdefault(thing, Exclusive())
        except TypeError:  # neither hashable nor weakly referable: its lock cannot be shared
            return Exclusive()


def _in_a_child() -> None:
    global _making
    _making = threading.Lock()
    for lock in list(_known.values()):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)
