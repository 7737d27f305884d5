"""Mutual exclusion: forwards of one model run one after another."""

from __future__ import annotations

import weakref
from typing import Any

from kamera import forks

_making = forks.Lock()
_locks: weakref.WeakKeyDictionary[Any, forks.Lock] = weakref.WeakKeyDictionary()


def exclusive_of(thing: Any) -> forks.Lock:
    """The lock of a model or a processor, shared by all of its backbones."""
    with _making:
        try:
            return _locks.setdefault(thing, forks.Lock())
        except TypeError:  # neither hashable nor weakly referable: its lock cannot be shared
            return forks.Lock()
