"""A client that goes away ends its work within a layer of a prefill, or a step of an answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kamera.engines import is_later
from tests.models.hooks import hooked
from tests.serve.rig import SYSTEM, Served, backbone, eventually, frames, png, serving

CHAT = "/v1/chat/completions"
NOTICED = 0.5
"""Seconds in which a server hears that a connection is closed."""


class Layers:
    """Counts layers of the model; at one of the ``kind`` it waits until the client has gone."""

    def __init__(self, kind: str, at: int) -> None:
        self.reached, self.gone = threading.Event(), threading.Event()
        self.after = 0
        self._kind, self._at, self._seen = kind, at, 0

    def note(self, kind: str, tokens: int) -> None:
        """A layer begins, of the decoder over so many tokens, or of the tower."""
        if is_later():  # what other requests left for later goes on
            return
        if self.gone.is_set():
            self.after += 1
            return
        kind = "step" if kind == "prefill" and tokens == 1 else kind
        self._seen += kind == self._kind
        if kind == self._kind and self._seen == self._at:
            self.reached.set()
            self.gone.wait(20)
            time.sleep(NOTICED)


@contextmanager
def watched(layers: Layers) -> Iterator[None]:
    engine = backbone()
    parts = [("prefill", layer) for layer in engine.decoder.layers]
    parts += [("tower", engine.towers[0].blocks[0]), ("tower", engine.towers[0].blocks[1])]
    hooks = [
        (
            layer.register_forward_hook,
            lambda module, args, out, kind=kind: layers.note(kind, args[0].shape[-2]),
        )
        for kind, layer in parts
    ]
    with hooked(engine, *hooks):
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def leave(served: Served, body: dict[str, Any], layers: Layers) -> None:
    """Ask, and close the connection while the layers wait."""
    host = httpx.URL(served.url)
    data = httpx.Request("POST", served.url + CHAT, json=body)
    with socket.create_connection((host.host, host.port)) as line:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        line.sendall(f"{head}content-length: {len(data.content)}\r\n\r\n".encode() + data.content)
        assert layers.reached.wait(20)
    layers.gone.set()


@pytest.mark.few(1)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("kind", "at"), [("prefill", 1), ("prefill", 3), ("tower", 1), ("step", 7)], ids=str)
def test_no_layer_runs_after_a_client_has_gone(served, kind, at, streams):
    before = backbone().model.generation_config.eos_token_id
    backbone().model.generation_config.eos_token_id = None
    number = f"{kind} {at} {streams}"  # a prompt that came before would not be prefilled
    image = frames()[0].copy()
    image.putpixel((0, 0), (at, len(kind), 9 * streams))  # one that was never encoded
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(image)}"}}
    content = [{"type": "text", "text": number}, picture, {"type": "text", "text": "value of tag 4?"}]
    body = {
        "model": "testbed",
        "max_tokens": 4000,
        "temperature": 0,
        "messages": [SYSTEM, {"role": "user", "content": content}],
        "stream": streams,
    }
    done = served.front.worker.done
    layers = Layers(kind, at)
    try:
        with watched(layers):
            leave(served, body, layers)
            eventually(lambda: served.front.worker.done > done)
    finally:
        backbone().model.generation_config.eos_token_id = before
    assert layers.after == 0
    answer = served.post(CHAT, {**body, "max_tokens": 2, "stream": False})
    assert answer.json()["usage"]["completion_tokens"] == 2
