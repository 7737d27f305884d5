"""What the windows of a pool do, told under the ids of its sessions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from kamera.window import Event, Listener, Trace

Traces = str | os.PathLike[str] | Callable[[str], Listener]
"""A file for all tenants, or a function from a tenant to the listener of its windows."""

_SESSION: ContextVar[str] = ContextVar("session", default="")


class Telling:
    """A listener of a tenant's windows. It passes on what they do in a turn of a session, under its id."""

    def __init__(self, traces: Traces, tenant: str) -> None:
        self._to = traces(tenant) if callable(traces) else Trace(traces)
        self._prefix = f"{tenant}: " if tenant and not callable(traces) else ""

    def __call__(self, event: Event) -> None:
        if session := _SESSION.get():  # else it is later work, which no turn may ever show
            self._to(replace(event, session=self._prefix + session))


@contextmanager
def as_session(session: str) -> Iterator[None]:
    """Context of a turn of a session, in this thread."""
    token = _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(token)
