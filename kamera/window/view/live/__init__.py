"""The page of lives that go on, its server-sent events, and a server of both (`kamera-kv[serve]`)."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator

import anyio
import uvicorn
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kamera.errors import StoreError
from kamera.window.view.page import document, page
from kamera.window.view.story import Lives

PAUSE = 0.5
"""Seconds between two looks at what is new."""


class Page:
    """Two routes: the page of the lives that a request may see, and the events by which it goes on."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.stopping = False

    def visible_lives(self, request: Request) -> Lives:
        """The lives. Raises what the application answers instead."""
        raise NotImplementedError

    @property
    def routes(self) -> list[Route]:
        """``/``, which must not move, as the page asks for the events beside it."""
        return [Route("/", self.page), Route("/events", self.events)]

    async def page(self, request: Request) -> Response:
        """The page, which asks for its lives."""
        self.visible_lives(request)
        return HTMLResponse(page((), title=self.title, live=True), headers={"cache-control": "no-store"})

    async def events(self, request: Request) -> Response:
        """All lives, then those that go on, until ``stopping``."""
        return EventSourceResponse(self._tell(self.visible_lives(request)))

    async def _tell(self, lives: Lives) -> AsyncIterator[ServerSentEvent]:
        count = -1
        while not self.stopping:
            if (new_count := lives.count) != count:
                yield ServerSentEvent(await anyio.to_thread.run_sync(_text, lives, count))
                count = new_count
            await anyio.sleep(PAUSE)


class PageServer(uvicorn.Server):
    """A server that stops although its page never ends."""

    def __init__(self, config: uvicorn.Config, shown: Page) -> None:
        super().__init__(config)
        self._page = shown

    async def shutdown(self, sockets: object = None) -> None:
        """As uvicorn's."""
        self._page.stopping = True
        await super().shutdown(sockets)  # type: ignore[arg-type]


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket on an address; port 0 takes a free one. Raises StoreError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise StoreError(f"{host}:{port} cannot be taken ({error.strerror}): give another --port") from None


def _text(lives: Lives, count: int) -> str:
    return json.dumps(document(lives.since(count)), separators=(",", ":"))
