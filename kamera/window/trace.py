"""A record of window operations: chunk ids, token counts and times, never content."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from kamera.window.events import Event
from kamera.window.slots import Slot

logger = logging.getLogger(__name__)


class Trace:
    """A listener that appends a JSON line to a file for each operation.

    ``time`` (seconds since 1970), ``operation``, ``anchor`` (digest of the anchor tokens), ``chunks`` (ids in
    the window afterwards, in order), ``tokens`` (of each), and ``placed``: chunks from this index on were
    placed anew by this operation, so each of them needed a patch for those before it.

    Any number of windows, threads and processes may write one file. If it cannot be written, the line is lost
    with a warning; the operation never fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, event: Event) -> None:
        """Write the line of an operation."""
        operation, before, after = event.operation, event.before, event.report.slots
        line = {
            "time": round(event.time, 3),
            "operation": operation,
            "anchor": event.anchor,
            "chunks": [slot.chunk_id for slot in after],
            "tokens": [slot.length for slot in after],
            "placed": _placed(operation, before, after),
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", 0) as file:
                file.write(data)  # whole: a short append is one write
        except OSError as error:
            logger.warning("an operation is missing from the trace: %s", error)


def _placed(operation: str, before: Sequence[Slot], after: Sequence[Slot]) -> int:
    """Index of the first chunk that is placed anew; chunks that merely survive do not count."""
    if operation in ("append", "recall"):
        here = {slot.number for slot in before}
        return len(after) - (after[-1].number not in here)  # a recall of a chunk in view moves nothing
    if operation in ("reorder", "assemble"):
        stayed = (old.number == new.number for old, new in zip(before, after, strict=False))
        return next((i for i, same in enumerate(stayed) if not same), min(len(before), len(after)))
    return len(after)
