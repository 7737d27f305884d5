"""Store errors that a window tolerates: one warning, and a note in the report of each operation concerned."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kamera.errors import CorruptChunk, NotKept, StoreError, StoreVersionError, WrongKey

logger = logging.getLogger(__name__)

STORE_ERRORS = (StoreError, StoreVersionError, OSError)
"""Errors of a store that is full, locked, closed, read-only, out of reach or of a newer format."""

LOOK_UP_ERRORS = (CorruptChunk, WrongKey, *STORE_ERRORS)
"""Errors for which a look-up counts as a miss."""


class Losses:
    """Lets a window and its forks go on without their store.

    ``unkept`` are the ids of chunks whose canonical the store refused; they are offered again when the chunk
    leaves.
    """

    def __init__(self) -> None:
        self.unkept: set[str] = set()
        self._said = False
        self._left: deque[str] = deque()
        self._operation = threading.local()

    @contextmanager
    def note_in(self, notes: list[str]) -> Iterator[None]:
        """Context in which this thread's losses are added to ``notes``, after what was left for them."""
        while self._left:
            note = self._left.popleft()
            notes.extend([] if note in notes else [note])
        self._operation.notes = notes
        try:
            yield
        finally:
            self._operation.notes = None

    @contextmanager
    def absorb_errors(self, what: str) -> Iterator[None]:
        """Context that absorbs store errors, and warns and notes that ``what`` was lost, and why."""
        try:
            yield
        except STORE_ERRORS as error:
            self._warn_and_note(f"{what}: {error}")

    def miss(self, kind: str, of: str, error: Exception) -> None:
        """Warn of a look-up that raised ``error``, one of `LOOK_UP_ERRORS`, and note it: it counts as a miss.

        ``kind`` is that of a damaged or sealed object; ``of`` names what the store could not look up.
        """
        if isinstance(error, CorruptChunk | WrongKey):
            logger.warning("a stored %s was refused: %s", kind, error)
            self.note(f"{kind} refused: {error}")
        else:
            with self.absorb_errors(f"{of} was not looked up"):
                raise error

    def note_for_next(self, note: str) -> None:
        """Add to the notes of the next operation: for work that no operation waits for."""
        self._left.append(note)

    def note(self, note: str) -> None:
        """Add to the notes of this thread's operation, if there is one."""
        notes: list[str] | None = getattr(self._operation, "notes", None)
        if notes is not None:
            notes.append(note)

    def _warn_and_note(self, note: str) -> None:
        note = " ".join(note.split())
        notes: list[str] | None = getattr(self._operation, "notes", None)
        if notes is None:
            self.note_for_next(note)  # of background work: the next report names it
        elif note not in notes:
            notes.append(note)
        logger.warning("%s", note)
        if not self._said:
            self._said = True
            message = f"the window goes on without its store: {note}; reports name whatever else is not kept"
            warnings.warn(message, NotKept, stacklevel=2)


class Strict(Losses):
    """Tolerates no loss: for work whose only result is stored objects."""

    @contextmanager
    def absorb_errors(self, what: str) -> Iterator[None]:
        """Context that lets store errors through."""
        yield
