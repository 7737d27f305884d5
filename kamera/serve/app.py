"""The application: routes, keys, limits, and answers that end when nobody listens; and its server."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import uvicorn
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from kamera.content import Fields, json_object
from kamera.errors import KameraError, quote
from kamera.serve.chat import Chat
from kamera.serve.dialect import Dialect, Events, Said
from kamera.serve.keys import Keys
from kamera.serve.limits import Limits
from kamera.serve.messages import Messages
from kamera.serve.refusal import Refusal, refusal_of
from kamera.serve.responses import Documents, Responses
from kamera.serve.service import Answer, Count, Service
from kamera.serve.worker import AT_ONCE, Job, Worker
from kamera.window.view import Lives
from kamera.window.view.live import Page, PageServer

WAITING = 64
"""Requests that may wait for the model."""

READING, SENDING = 60, 60
"""Seconds in which a request must have come, and an event have gone to a client that reads slowly."""

SWITCHING = 1e-4
"""Seconds after which a thread lets another one run Python. A forward asks for that at each operation;
beside a long history that is being read it would wait fifty times as long, Python's 5e-3, each time.
"""

STOPPING, CONNECTIONS = 120, 512
"""Seconds that answers may take after a server was told to stop; connections at once, others get a 503."""


Spoken = TypeVar("Spoken", bound=Dialect)


class Notice(NamedTuple):
    """What a server says of itself: a line for people, and the same as a JSON object."""

    line: str
    facts: dict[str, Any]


def print_notice(notice: Notice) -> None:
    """Print the line to stdout."""
    print(notice.line, flush=True)


class Bodies:
    """Counts the bytes of bodies, each until its request is answered or its client has gone."""

    def __init__(self, limits: Limits) -> None:
        self.bytes, self._limits = 0, limits

    def limit_bodies(self, app: ASGIApp) -> ASGIApp:
        """The application, in which a body that is too large, or one too many, ends its own request."""
        return partial(self._run, app)

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        mine = 0

        async def part() -> Message:
            nonlocal mine
            message = await receive()
            size = len(message.get("body", b""))
            mine, self.bytes = mine + size, self.bytes + size
            if self.bytes > self._limits.bodies:
                raise Refusal(503, f"{self._limits.bodies} bytes of requests are in work: try later", wait=5)
            if mine > self._limits.body:
                raise Refusal(413, f"the body has more than {self._limits.body} bytes: send less")
            return message

        try:
            await app(scope, part, send)
        finally:
            self.bytes -= mine


class Front(Page):
    """The routes before a service; ``names`` are those of its model."""

    def __init__(
        self,
        service: Service,
        keys: Keys,
        names: Sequence[str],
        *,
        waiting: int = WAITING,
        at_once: int = AT_ONCE,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(names[0])
        self.service = service
        self.worker = Worker(waiting, at_once)
        self.limits = limits or Limits()
        self._keys, self._names = keys, tuple(names)
        self._documents, self._bodies = Documents(service.store), Bodies(self.limits)
        self._started = int(time.time())
        self._refused = 0

    def visible_lives(self, request: Request) -> Lives:
        """The lives of the tenant's sessions."""
        return self.service.lives_of(self._keys.tenant(request))

    def opened(self, url: str) -> Notice:
        """What is said once the server listens at ``url``."""
        return Notice(f"kamera serves on {url}", {"url": url, "models": self._names, "pid": os.getpid()})

    def close(self) -> Notice:
        """Finish what runs and waits, save, and say so."""
        self.worker.close()
        self._documents.close()
        store, saved, problem = self.service.store, 0, None
        try:
            saved = self.service.close()
        except KameraError as error:
            problem = str(error)
        where = "nothing kept" if store is None else f"{saved} sessions saved in {store}"
        end = f", {where}" if problem is None else f"; not all is saved: {problem}"
        facts = {"requests": self.worker.done, "sessions": saved, "store": store and str(store)}
        return Notice(f"stopped after {self.worker.done} requests{end}", {**facts, "problem": problem})

    def app(self, life: Lifespan[Starlette] | None = None) -> Starlette:
        """The application."""
        AppStatus.disable_automatic_graceful_drain()  # a stopping server finishes its streams
        app = Starlette(
            lifespan=life,
            middleware=[Middleware(self._bodies.limit_bodies)],
            routes=[
                *self.routes,
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/messages", self.answer, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
                Route("/v1/responses", self.answer, methods=["POST"]),
                Route("/v1/responses/{name}", self.response, methods=["GET", "DELETE"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/openapi.json", self.openapi),
            ],
            exception_handlers=dict.fromkeys((Refusal, HTTPException, KameraError, Exception), self._refuse),
        )
        app.router.redirect_slashes = False
        return app

    async def answer(self, request: Request) -> Response:
        """An answer, in the words of the API whose path it is."""
        documents, name = self._documents, request.url.path.rpartition("/")[2]

        def read(body: Fields, session: str | None, tenant: str) -> Chat | Messages | Responses:
            if name == "responses":
                return Responses(body, session, documents, tenant)
            return (Messages if name == "messages" else Chat)(body, session)

        tenant, dialect = await self._read(request, read)
        job = Answer(self.service, tenant, dialect.asked)
        # what fails before the first text has a status of its own
        heard = await self._first_heard(request, tenant, dialect, job)
        if not dialect.asked.stream:
            return JSONResponse(await anyio.to_thread.run_sync(dialect.whole_answer, heard[0]))
        return EventSourceResponse(self._events(job, dialect, heard), send_timeout=SENDING)

    async def response(self, request: Request) -> Response:
        """A kept response, or its deletion."""
        tenant, name = self._keys.tenant(request), request.path_params["name"]
        document = self._documents.get(tenant, name)
        if request.method != "DELETE":
            return JSONResponse(document)
        await anyio.to_thread.run_sync(self.service.delete, document["kamera"]["turn_id"], tenant)
        self._documents.drop(tenant, name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def count(self, request: Request) -> Response:
        """Tokens of a message's prompt."""
        tenant, dialect = await self._read(
            request, lambda body, session, _: Messages(body, session, counts=True)
        )
        heard = await self._first_heard(request, tenant, dialect, Count(self.service, tenant, dialect.asked))
        return JSONResponse({"input_tokens": heard[0]})

    async def models(self, request: Request) -> Response:
        """The names of the model."""
        self._keys.tenant(request)
        head = {"object": "model", "created": self._started, "owned_by": "kamera"}
        if (name := request.path_params.get("name")) is not None:
            self._check_model(name)
            return JSONResponse({"id": name, **head})
        return JSONResponse({"object": "list", "data": [{"id": name, **head} for name in self._names]})

    async def health(self, request: Request) -> Response:
        """That the server is there, and how many requests wait."""
        return JSONResponse({"status": "ok", "waiting": self.worker.waiting})

    async def metrics(self, request: Request) -> Response:
        """Counts of a tenant for Prometheus, and of the server those that tell nothing of others."""
        tenant = self._keys.tenant(request)
        counts = {**self.service.counts(tenant), **self.worker.counts(tenant)}
        counts |= {"refused": self._refused, "body_bytes": self._bodies.bytes}
        return PlainTextResponse("".join(f"kamera_{name} {count}\n" for name, count in counts.items()))

    async def openapi(self, request: Request) -> Response:
        """What the paths take, as OpenAPI."""
        return Response(Path(__file__).with_name("openapi.json").read_bytes(), media_type="application/json")

    async def _read(
        self, request: Request, read: Callable[[Fields, str | None, str], Spoken]
    ) -> tuple[str, Spoken]:
        """Tenant and body of a request; ``read`` takes the body, the session's id and the tenant.

        A body may be large: it is read in a thread, and nobody else waits.
        """
        tenant = self._keys.tenant(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another origin cannot send it unasked
            raise Refusal(415, f"content-type {quote(kind)}: send application/json")
        try:
            with anyio.fail_after(READING):
                data = b"".join([part async for part in request.stream()])  # a Request would keep its body
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {READING} s: send it faster") from None

        def checked() -> Spoken:
            dialect = read(Fields(json_object(data)), request.headers.get("x-session-id"), tenant)
            self._check_model(dialect.model)
            self.limits.check(dialect.asked.messages)
            return dialect

        return tenant, await anyio.to_thread.run_sync(checked)

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            message = f"no model {quote(name)} here: ask {', '.join(self._names)}"
            raise Refusal(404, message, "model", "model_not_found")

    async def _first_heard(self, request: Request, tenant: str, dialect: Dialect, job: Job[Any]) -> Any:
        """Submit a job; the first that is heard of it, the result unless its answer is a stream.

        A client that goes away cancels it.
        """
        self.worker.submit(tenant, job)
        watch = asyncio.create_task(self._watch(request, job))
        try:
            while isinstance(heard := await job.next(), str) and not dialect.asked.stream:
                pass
            return heard
        except BaseException:
            job.cancel()
            raise
        finally:
            watch.cancel()

    async def _watch(self, request: Request, job: Job[Any]) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    async def _events(
        self, job: Answer, dialect: Chat | Messages | Responses, heard: str | tuple[Said]
    ) -> AsyncIterator[bytes]:
        """The events of an answer, from what was heard first."""
        try:
            yield _encode(dialect.opening_events())
            while isinstance(heard, str):
                yield _encode(dialect.piece_events(heard))
                heard = await job.next()
            said = heard[0]
            yield await anyio.to_thread.run_sync(lambda: _encode(dialect.closing_events(said)))
        except Refusal as refusal:
            yield _encode(dialect.error_events(refusal))
        finally:
            job.cancel()

    async def _refuse(self, request: Request, error: Exception) -> Response:
        self._refused += 1
        if isinstance(error, HTTPException):
            error = Refusal(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
        refusal = refusal_of(error)
        made = refusal.anthropic() if request.url.path.startswith("/v1/messages") else refusal.openai()
        return JSONResponse(made, refusal.status, refusal.headers)


def _encode(events: Events) -> bytes:
    """The events of a dialect as they are sent."""
    told = ((e, {}) if isinstance(e, str) else (json.dumps(e, ensure_ascii=False), e) for e in events)
    return b"".join(ServerSentEvent(text, event=data.get("type")).encode() for text, data in told)


def server_of(front: Front, on: socket.socket, say: Callable[[Notice], None] = print_notice) -> PageServer:
    """The server of a front on a bound socket. When it stops, what runs and waits is finished and saved.

    It will ``say`` that it is ready, and that it has stopped.
    """

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        host, port = on.getsockname()[:2]
        say(front.opened(f"http://{f'[{host}]' if ':' in host else host}:{port}"))
        yield
        say(front.close())

    limits: dict[str, Any] = {"timeout_graceful_shutdown": STOPPING, "limit_concurrency": CONNECTIONS}
    config = uvicorn.Config(front.app(life), log_level="warning", server_header=False, **limits)
    return PageServer(config, front)


def run(front: Front, on: socket.socket, say: Callable[[Notice], None] = print_notice) -> None:
    """Serve until the process is told to end; ``say`` as for `server_of`."""
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn stops at them, and sends them once more then
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # what is loaded lives as long as the process: no collection stops a request to look at it
    sys.setswitchinterval(SWITCHING)
    server_of(front, on, say).run(sockets=[on])
