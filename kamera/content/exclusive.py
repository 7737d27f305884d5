"""Mutual exclusion: forwards of one model run one after another."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kamera import forks


class Exclusive:
    """One re-entrant lock. A process forked while another thread held it starts with a free one."""

    def __init__(self) -> None:
        self._lock = forks.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock for the block."""
        with self._lock:
            yield

    @property
    def mine(self) -> bool:
        """True if this thread holds the lock."""
        return self._lock.mine

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let other threads in for the block; this thread holds the lock, once."""
        self._lock.__exit__()
        try:
            yield
        finally:
            self._lock.__enter__()


_making = forks.Lock()
_known: weakref.WeakKeyDictionary[Any, Exclusive] = weakref.WeakKeyDictionary()


def exclusive_of(thing: Any) -> Exclusive:
    """The lock of a model or a processor, shared by all of its backbones."""
    with _making:
        try:
            return _known.setdefault(thing, Exclusive())
        except TypeError:  # neither hashable nor weakly referable: its lock cannot be shared
            return Exclusive()
