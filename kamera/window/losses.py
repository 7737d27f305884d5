"""What a window's store did not take or give: told once as a warning, and in the notes of each operation."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from kamera.errors import NotKept, StoreError, StoreVersionError
from kamera.window.report import Tally

logger = logging.getLogger(__name__)

STORE_ERRORS = (StoreError, StoreVersionError, OSError)
"""How a store says that it cannot: full, locked, closed, read-only, out of reach, of a newer format."""


class Losses:
    """Lets a window and its forks go on without their store.

    ``unkept`` are the ids of chunks whose canonical the store refused; they are offered again when the chunk
    leaves.
    """

    def __init__(self) -> None:
        self.unkept: set[str] = set()
        self._said = False
        self._operation = threading.local()

    @contextmanager
    def told_to(self, tally: Tally) -> Iterator[None]:
        """Inside, what is lost by this thread stands in the notes of ``tally``."""
        self._operation.tally = tally
        try:
            yield
        finally:
            self._operation.tally = None

    @contextmanager
    def borne(self, what: str) -> Iterator[None]:
        """Bear what the store raises inside, and tell: ``what`` was lost, and why."""
        try:
            yield
        except STORE_ERRORS as error:
            self._tell(f"{what}: {error}")

    def _tell(self, note: str) -> None:
        note = " ".join(note.split())
        tally: Tally | None = getattr(self._operation, "tally", None)
        if tally is not None and note not in tally.notes:
            tally.notes.append(note)
        logger.warning("%s", note)
        if not self._said:
            self._said = True
            message = f"the window goes on without its store: {note}; reports name whatever else is not kept"
            warnings.warn(message, NotKept, stacklevel=2)


class Strict(Losses):
    """Bears nothing: for work whose only fruit is what the store keeps."""

    @contextmanager
    def borne(self, what: str) -> Iterator[None]:
        """Whatever the store raises inside is raised."""
        yield
