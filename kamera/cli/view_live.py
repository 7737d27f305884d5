"""The page of a trace that goes on, served to this machine alone."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from starlette.requests import Request

from kamera.cli.output import Output
from kamera.window import read_events
from kamera.window.view import Lives
from kamera.window.view.live import Page, bound, page_server

HOST = "127.0.0.1"


class Tail(Page):
    """The page of a trace, which goes on as that grows. Raises as `read_trace` at construction."""

    def __init__(self, title: str, trace: Path) -> None:
        super().__init__(title)
        self._lives, self._trace, self._read = Lives(), trace, 0
        self.read()

    def seen(self, request: Request) -> Lives:
        """All of it."""
        return self._lives

    def read(self) -> None:
        """Take the lines that came since."""
        with self._trace.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for event in read_events(whole, str(self._trace)):
            self._lives(event)
        self._read += len(whole)

    def follow(self, pause: float = 0.5) -> None:
        """Read again and again."""
        while True:
            time.sleep(pause)
            self.read()


def serve_live(trace: Path, title: str, port: int, out: Output) -> None:
    """Serve the page of a trace until Ctrl-C; prints its address."""
    tail, listening = Tail(title, trace), bound(HOST, port)
    threading.Thread(target=tail.follow, daemon=True).start()
    print(f"http://{HOST}:{listening.getsockname()[1]}/", flush=True)
    out.note("Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        page_server(tail).run(sockets=[listening])
