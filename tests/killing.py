"""Children that die at the n-th call of a real function: a point in the program, and no moment in time."""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["before", "half", "after"]
_write = os.write  # as it is before anybody counts its calls


@dataclass(frozen=True)
class Ended:
    """How a child ended: ``killed`` or by itself, and what it had ``told`` until then."""

    killed: bool
    told: bytes


class Countdown:
    """Ends this process by SIGKILL at the ``n``-th of the calls that it wraps; 0: never.

    ``phase``: before that call, after it, or when half of the bytes of a write are written. ``done`` is
    told of every call that came to its end; ``calls`` are all.
    """

    def __init__(self, n: int = 0, phase: Phase = "before", done: Callable[[], None] = lambda: None) -> None:
        self._left = n
        self._lock = threading.Lock()
        self.calls = 0
        self.phase = phase
        self._done = done

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, counted."""

        @functools.wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            with self._lock:  # a batch is written by several threads
                self._left -= 1
                self.calls += 1
                last = self._left == 0
            if last and self.phase != "after":
                if self.phase == "half":
                    call(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                die()
            result = call(*arguments, **named)
            self._done()
            if last:
                die()
            return result

        return counted

    @contextmanager
    def over(self, owner: Any, *names: str) -> Iterator[None]:
        """Inside, these functions of ``owner`` are counted together."""
        real = {name: getattr(owner, name) for name in names}
        for name, call in real.items():
            setattr(owner, name, self.wrap(call))
        try:
            yield
        finally:
            for name, call in real.items():
                setattr(owner, name, call)


def in_child(work: Callable[[Callable[[bytes], None]], None]) -> Ended:
    """Fork a child that does ``work(tell)``, and wait for its end; its own failure is an AssertionError."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            work(lambda data: _write(writing, data) and None)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the child ended with status {status}"
    return Ended(killed, told)


def die() -> None:
    """End this process as a loss of power would: nothing is flushed, nothing cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)
