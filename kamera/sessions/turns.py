"""The order of a session's turns: one at a time, each from the state that the last one left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kamera import forks
from kamera.sessions.showing import State


class Turns:
    """Lets the threads of one session change it one after another."""

    def __init__(self) -> None:
        self._lock = forks.Lock()

    @contextmanager
    def taken(self, seen: State) -> Iterator[State]:
        """Context of one change; waits for those of other threads, and gives back the state seen before that.

        Raises ValueError inside of another change of the same thread, whose state would replace this one's.
        """
        if self._lock.mine:
            raise ValueError("this session is in the midst of an answer: use session.fork() in a streamer")
        with self._lock:
            yield seen
