"""A server that runs: it says its address when it is ready, and what it kept when it has stopped."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from kamera.errors import StoreError
from kamera.serve.app import Front

STOPPING = 120
"""Seconds that answers may take after a server was told to stop."""

CONNECTIONS = 512
"""Connections at once, at most: others get a 503."""


class Server(uvicorn.Server):
    """A server on an address that prints one line when requests are answered."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            print(f"kamera serves on http://{name}:{port}", flush=True)


def bound(host: str, port: int) -> socket.socket:
    """A socket on an address; port 0 takes a free one. Raises StoreError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise StoreError(f"{host}:{port} cannot be taken ({error.strerror}): give another --port") from None


def server_of(front: Front) -> Server:
    """The server of a front. When it stops, what runs and waits is finished and saved."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        print(front.close(), flush=True)

    limits: dict[str, Any] = {"timeout_graceful_shutdown": STOPPING, "limit_concurrency": CONNECTIONS}
    return Server(uvicorn.Config(front.app(life), log_level="warning", server_header=False, **limits))


def run(front: Front, on: socket.socket) -> None:
    """Serve until the process is told to end."""
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops at them, and sends them once more then
        signal.signal(number, signal.SIG_IGN)
    server_of(front).run(sockets=[on])
