"""The page of a trace that goes on, served to this machine alone."""

from __future__ import annotations

import contextlib
import json
import time
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kamera.cli.output import Output
from kamera.window import read_trace
from kamera.window.view import document, page

HOST = "127.0.0.1"
PAUSE = 0.5
"""Seconds between two looks at the file."""

BEAT = 15.0
"""Seconds after which a silent line says that it lives, and so finds out whether its reader left."""


def serve_live(trace: Path, title: str, port: int, out: Output) -> None:
    """Serve the page of a trace until Ctrl-C; prints its address."""
    with ThreadingHTTPServer((HOST, port), partial(Handler, trace, title)) as server:
        server.daemon_threads = True
        print(f"http://{HOST}:{server.server_port}/", flush=True)
        out.note("Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """``/`` is the page, ``/events`` its document again whenever the trace has grown."""

    def __init__(self, trace: Path, title: str, *args: object) -> None:
        self.trace, self.title = trace, title
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer a request of this machine, under its own name: a page elsewhere may not read it."""
        name = self.headers.get("Host", "").rpartition(":")[0]
        if name not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            made = page(read_trace(self.trace), title=self.title, live=True).encode()
            self._begin("text/html; charset=utf-8")
            self.wfile.write(made)
        elif self.path == "/events":
            self._begin("text/event-stream")
            self._follow()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""

    def _begin(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _follow(self) -> None:
        size, said = -1, time.monotonic()
        try:
            while True:
                now = self.trace.stat().st_size
                if now != size:
                    told = json.dumps(document(read_trace(self.trace)), separators=(",", ":"))
                    self.wfile.write(f"data: {told}\n\n".encode())
                    size, said = now, time.monotonic()
                elif time.monotonic() - said > BEAT:
                    self.wfile.write(b": still here\n\n")
                    said = time.monotonic()
                self.wfile.flush()
                time.sleep(PAUSE)
        except OSError:
            return  # the reader left, or the file went
