"""A profiler of Kamera's own frames, and counters of functions that are called from any thread."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kamera

PACKAGE = str(Path(kamera.__file__).parent) + os.sep


class Counter:
    """A profiler for `sys.setprofile`: frames of `kamera` in the calling thread."""

    def __init__(self) -> None:
        self.depth = 0
        self._codes: Tally[CodeType] = Tally()
        self._now = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """See `sys.setprofile`."""
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self._codes[code] += 1
            self._now += 1
            self.depth = max(self.depth, self._now)
        elif event == "return":
            self._now -= 1

    @property
    def calls(self) -> int:
        """Frames that were entered; a generator's every resumption is one."""
        return self._codes.total()

    @property
    def files(self) -> int:
        """Files that the frames are in."""
        return len({code.co_filename for code in self._codes})

    def calls_of(self, file: str, function: str) -> int:
        """Calls of one function, in a ``file`` named from the package's folder on."""
        named = ((c.co_filename.removeprefix(PACKAGE), c.co_name, n) for c, n in self._codes.items())
        return sum(n for where, name, n in named if (where, name) == (file, function))


@contextmanager
def profiled() -> Iterator[Counter]:
    """Count the calling thread's frames."""
    counter, before = Counter(), sys.getprofile()
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(before)


@contextmanager
def tapped(owner: Any, name: str) -> Iterator[list[int]]:
    """The threads that call ``owner.name``, one entry a call."""
    threads: list[int] = []
    function: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return function(*args, **options)

    setattr(owner, name, counted)
    try:
        yield threads
    finally:
        setattr(owner, name, function)
