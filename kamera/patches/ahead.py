"""What is prepared, as later work, for what will probably be asked next."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from kamera import forks
from kamera.engines import Engine
from kamera.patches.later import LaterPiece, Ready, Worth, later_of

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """One thing that is prepared for the next request of its owner alone. Thread-safe.

    What is prepared for all owners on a backbone counts towards the memory of its later work, which drops it
    first. Nothing is prepared for an owner that is gone.
    """

    def __init__(self, engine: Engine) -> None:
        self._queue = later_of(engine)
        self._lock = forks.Lock()
        self._pieces: list[LaterPiece] = []  # the last one, until it is taken
        weakref.finalize(self, _forget, self._pieces)

    def begin(self, make: Callable[[], Ready[Made] | None]) -> None:
        """Make something ahead, as later work; what was made before is dropped.

        ``make`` must not hold the owner.
        """
        with self._lock:
            self._take()
            self._pieces.append(self._queue.add(make, Worth.GUESS, dropped=logger.info))

    def take(self) -> Made | None:
        """What was made, which is given once; None if nothing was, or not yet. Work on it ends."""
        with self._lock:
            return self._take()

    def _take(self) -> Made | None:
        if not self._pieces:
            return None
        piece = self._pieces.pop()
        made = cast("Made | None", piece.made)
        self._queue.cancel(piece)
        return made


def _forget(pieces: Sequence[LaterPiece]) -> None:
    for piece in pieces:
        piece.forget()
