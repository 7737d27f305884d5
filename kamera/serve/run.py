"""A server that runs: it says its address when it is ready, and what it kept when it has stopped."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kamera.serve.app import Front
from kamera.window.view.live import PageServer

STOPPING, CONNECTIONS = 120, 512
"""Seconds that answers may take after a server was told to stop; connections at once, others get a 503."""


def server_of(front: Front, on: socket.socket) -> PageServer:
    """The server of a front on a bound socket. When it stops, what runs and waits is finished and saved."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        host, port = on.getsockname()[:2]
        print(f"kamera serves on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        yield
        print(front.close(), flush=True)

    limits: dict[str, Any] = {"timeout_graceful_shutdown": STOPPING, "limit_concurrency": CONNECTIONS}
    config = uvicorn.Config(front.app(life), log_level="warning", server_header=False, **limits)
    return PageServer(config, front)


def run(front: Front, on: socket.socket) -> None:
    """Serve until the process is told to end."""
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops at them, and sends them once more then
        signal.signal(number, signal.SIG_IGN)
    server_of(front, on).run(sockets=[on])
