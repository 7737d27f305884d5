"""What is prepared, as later work, for what will probably be asked next."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kamera import forks
from kamera.engines import Engine
from kamera.patches.later import LaterPiece, Worth, later_of

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


class _Ready(NamedTuple, Generic[Made]):
    """What was made; ``piece`` counts its bytes."""

    made: Made
    piece: LaterPiece


class Ahead(Generic[Made]):
    """One thing that is prepared for the next request of its owner alone. Thread-safe.

    What is prepared for all owners on a backbone counts towards the memory of its later work, which drops it
    first. Nothing is prepared for an owner that is gone.
    """

    def __init__(self, engine: Engine) -> None:
        self._queue = later_of(engine)
        self._lock = forks.Lock()
        self._asked: object = None  # what is worked on now, or was made ready
        self._work: LaterPiece | None = None
        self._ready: _Ready[Made] | None = None
        self._pieces: list[LaterPiece] = []
        weakref.finalize(self, _forget, self._pieces)

    def begin(self, make: Callable[[], tuple[Made, int] | None]) -> None:
        """Make something ahead, as later work: it and its bytes, or None; what was made before is dropped.

        ``make`` must not hold the owner.
        """
        self.take()
        asked = object()
        with self._lock:
            self._asked = asked
        mine = weakref.ref(self)

        def work() -> None:
            if mine() is None:
                return
            made, here = make(), mine()
            if here is not None and made is not None:
                here._made(asked, *made)

        piece = self._queue.add(work, Worth.GUESS, dropped=logger.info)
        with self._lock:
            if self._asked is asked:
                self._work = piece
                self._pieces.append(piece)
                return
        self._queue.cancel(piece)

    def take(self) -> Made | None:
        """What was made, which is given once; None if nothing was, or not yet. Work on it ends."""
        with self._lock:
            work, ready = self._work, self._ready
            self._asked = self._work = self._ready = None
            self._pieces.clear()
        if work is not None:
            self._queue.cancel(work)
        if ready is None:
            return None
        self._queue.cancel(ready.piece)
        return ready.made

    def _made(self, asked: object, made: Made, size: int) -> None:
        mine = weakref.ref(self)

        def dropped(_: str) -> None:
            here = mine()
            if here is not None:
                here._drop(asked)

        piece = self._queue.keep(Worth.GUESS, size, dropped)
        with self._lock:
            if self._asked is asked and not piece.unwanted:
                self._ready = _Ready(made, piece)
                self._pieces.append(piece)
                return
        self._queue.cancel(piece)

    def _drop(self, asked: object) -> None:
        with self._lock:
            if self._asked is asked:
                self._ready = None


def _forget(pieces: Sequence[LaterPiece]) -> None:
    for piece in pieces:
        piece.forget()
