"""What the three APIs have in common: a request is read, an answer written, whole or as events."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from sse_starlette import ServerSentEvent

from kamera.content import Fields
from kamera.serve.asked import Asked, Said
from kamera.serve.refusal import Refusal

Events = list[ServerSentEvent]


class Dialect:
    """One request in one API's words, and its answer.

    ``asked`` is read from the ``body`` at construction, which raises InvalidRequest. Events come from
    `opening`, then `piece` for each text, then `closing`; from `failing` if the answer breaks off.
    """

    prefix = ""

    def __init__(self, body: Fields, asked: Asked) -> None:
        self.model = body.need("model", str)
        body.done()
        self.asked = asked
        self.id = self.prefix + secrets.token_hex(12)
        self.created = int(time.time())

    def whole(self, said: Said) -> dict[str, Any]:
        """The answer as one object."""
        raise NotImplementedError

    def opening(self) -> Events:
        """Events before the first text."""
        raise NotImplementedError

    def piece(self, text: str) -> Events:
        """Events of a piece of text."""
        raise NotImplementedError

    def closing(self, said: Said) -> Events:
        """Events of the end: tool calls, usage."""
        raise NotImplementedError

    def failing(self, refusal: Refusal) -> Events:
        """Events of an error behind the first text."""
        return [event(refusal.openai())]


def event(data: dict[str, Any]) -> ServerSentEvent:
    """An event, named by its data's type if that has one."""
    return ServerSentEvent(json.dumps(data, ensure_ascii=False), event=data.get("type"))
