"""A real server on a free port, in a thread, and the plain sessions it is held against."""

from __future__ import annotations

import base64
import functools
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from kamera import ChatSession, ChunkStore, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.serve import Front, Keys, Limits, Service, bind_socket, server_of
from kamera.sessions import SessionMode

SYSTEM = {"role": "system", "content": testbed.SYSTEM}
KEY, OTHER = "a-key-of-the-first", "a-key-of-the-other"


@functools.cache
def backbone() -> HfEngine:
    """The backbone that ships with Kamera."""
    return HfEngine(*testbed.load())


@functools.cache
def frames() -> list[Any]:
    """Pictures of its world."""
    return [frame.image for frame in testbed.World(seed=3).episode(0, legends=4).frames]


@functools.cache
def plain() -> httpx.Client:
    """A client without certificates, which take long to load."""
    return httpx.Client(verify=False)


@dataclass
class Served:
    """A server that runs."""

    url: str
    front: Front

    def openai(self, key: str = KEY) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 60, "http_client": plain()}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def anthropic(self, key: str = KEY) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=False, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return plain().post(self.url + path, json=body, timeout=60, **options)


@contextmanager
def serving(
    model: HfEngine | None = None,
    policy: ReusePolicy | None = None,
    keys: dict[str, str] | None = None,
    *,
    mode: SessionMode = "auto",
    store: Path | None = None,
    waiting: int = 64,
    at_once: int = 16,
    names: tuple[str, ...] = ("testbed",),
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server, by default of the shipped backbone, under exact reuse and without keys."""
    service = Service(model or backbone(), policy or ReusePolicy.exact(), mode=mode, store=store, **options)
    front, sock = (
        Front(service, Keys(keys), names, waiting=waiting, at_once=at_once, limits=limits),
        bind_socket("127.0.0.1", 0),
    )
    server = server_of(front, sock)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", front)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def eventually(true: Callable[[], Any]) -> None:
    """Wait until something is true."""
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)


def said(messages: list[dict[str, Any]], tokens: int = 6, **options: Any) -> str:
    """The answer of a session of its own, which has seen nothing else."""
    chat = ChatSession(backbone(), ChunkStore.open("memory://"), policy=ReusePolicy.exact())
    return chat.send(messages, max_new_tokens=tokens, do_sample=False, **options).text


def png(image: Any) -> str:
    """A picture's file in base64."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return base64.b64encode(held.getvalue()).decode()


def user(text: str, image: Any = None) -> dict[str, Any]:
    """A user's message, as a session takes it."""
    if image is None:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def as_chat(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + png(item["image"])}}
        if item["type"] == "image"
        else item
        for item in message["content"]
    ]
    return {**message, "content": parts}
