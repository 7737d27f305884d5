"""A request to a pool, and what of it tells its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kamera.content import Message, Rendered
from kamera.edits import EditPolicy
from kamera.sessions.anchors import Anchors
from kamera.sessions.branches import whole_history
from kamera.sessions.layout import anchor_ids
from kamera.sessions.match import edited_prompt
from kamera.sessions.owners import tails_of
from kamera.sessions.saved import tools_digest
from kamera.sessions.tool_calls import CallForm


@dataclass(frozen=True, eq=False)
class Incoming:
    """``messages`` of a tenant, for a session of its own choice, behind a turn, or found by content.

    ``kind`` is the digest of its tools, ``whole`` the history with the messages, None if only the session has
    it; ``prompt`` and ``tails`` are those of the whole history, None and none if it cannot be cut.
    """

    messages: str | Message | Sequence[Message]
    tenant: str
    session_id: str | None
    after: str | None
    tools: Sequence[Any] | None
    hint: str
    kind: str
    whole: Sequence[Message] | None
    prompt: Rendered | None
    tails: frozenset[str]


def incoming(
    messages: str | Message | Sequence[Message],
    anchors: Anchors,
    calls: CallForm,
    policy: EditPolicy | None,
    *,
    session_id: str | None = None,
    after: str | None = None,
    tools: Sequence[Any] | None = None,
    hint: str = "",
) -> Incoming:
    """A request to the tenant of ``anchors``. Raises UnknownTurn, ValueError for what is no message."""
    kind, tenant, tails = tools_digest(tools), anchors.store.tenant, frozenset[str]()
    prompt, whole = None, None if isinstance(messages, str | Mapping) else messages
    if after is not None:
        whole = whole_history(anchors.branches.history(after), messages, branches=True)
    if whole is not None:
        prompt = edited_prompt(anchors.conversations, whole, tools, policy)
        if prompt is not None:
            tails = tails_of((tenant, kind, hint), anchor_ids(prompt), whole, calls, tools)
    return Incoming(messages, tenant, session_id, after, tools, hint, kind, whole, prompt, tails)
