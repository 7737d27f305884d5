"""A service that is asked in its own process, without a server."""

from __future__ import annotations

import json
import threading
from typing import Any

from kamera.content import Fields, json_object
from kamera.serve.chat import Chat
from kamera.serve.refusal import refusal_of
from kamera.serve.service import Service
from kamera.sessions import Stream


class Within:
    """Chat completions of a service for one tenant, one after another."""

    def __init__(self, service: Service, tenant: str = "") -> None:
        self._service, self._tenant, self._lock = service, tenant, threading.Lock()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """A ``chat.completion`` for a request's body. Raises Refusal."""
        try:
            dialect = Chat(Fields(json_object(json.dumps(body).encode())))
            stream = Stream(dialect.asked.stop, self._service.calls if dialect.asked.tools else None)
            with self._lock:
                return dialect.whole(self._service.answer(dialect.asked, self._tenant, stream))
        except Exception as error:
            raise refusal_of(error) from error
