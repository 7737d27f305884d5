"""A file of a window's events: without content unless that is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kamera.errors import TraceError
from kamera.window.events import Event

logger = logging.getLogger(__name__)


class Trace:
    """A listener that appends each `Event` to a file, as a JSON line of its own.

    By default a line has ids, numbers and times: no text, no picture, no sketch of a question. With
    ``content`` it has the labels, texts and small pictures of chunks, too. ``session`` names the
    conversation whose window it hears.

    Any number of windows, threads and processes may write one file. If it cannot be written, the line is lost
    with a warning; the operation never fails.
    """

    def __init__(self, path: str | os.PathLike[str], *, content: bool = False, session: str = "") -> None:
        self.path = Path(path)
        self.content = content
        self.session = session

    def __call__(self, event: Event) -> None:
        """Write the line of an operation."""
        event = event if self.content else event.without_content()
        event = replace(event, session=self.session) if self.session else event
        data = event.to_json().encode() + b"\n"
        try:
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", 0) as file:
                file.write(data)  # whole: a short append is one write
        except OSError as error:
            logger.warning("an operation is missing from the trace: %s", error)


def read_trace(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of a trace, in order. A last line that is still being written is left out.

    Raises TraceError naming the line for a file that is not a trace, OSError if it cannot be read.
    """
    return read_events(Path(path).read_bytes(), str(path))


def read_events(data: bytes, where: str) -> Iterator[Event]:
    """The events of a trace's ``data``, as `read_trace`; ``where`` names it in errors."""
    *whole, last = data.split(b"\n")
    for number, line in enumerate([*whole, last], start=1):
        try:
            event = Event.from_json(line)
        except ValueError as error:
            if number > len(whole):
                continue
            raise TraceError(
                f"{where}:{number}: not a window's operation ({error}): give a file that "
                "KameraWindow(trace=…) wrote"
            ) from None
        yield event
