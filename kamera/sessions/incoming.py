"""A request to a pool, and what of it tells its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kamera.content import Message, Rendered
from kamera.sessions.anchors import Anchors
from kamera.sessions.branches import whole_history
from kamera.sessions.document import tools_digest
from kamera.sessions.layout import anchor_ids
from kamera.sessions.match import edited_prompt
from kamera.sessions.modes import Manner
from kamera.sessions.owners import tails_of


@dataclass(frozen=True, eq=False)
class Incoming:
    """``messages`` of a tenant, for a session of its own choice, behind a turn, or found by content.

    ``manner`` is how it is answered, ``kind`` the digest of its tools, ``whole`` the history with the
    messages, None if only the session has it; ``prompt`` and ``tails`` are those of the whole history, None
    and none if it cannot be cut.
    """

    messages: str | Message | Sequence[Message]
    tenant: str
    session_id: str | None
    after: str | None
    manner: Manner
    hint: str
    kind: str
    whole: Sequence[Message] | None
    prompt: Rendered | None
    tails: frozenset[str]


def incoming(
    messages: str | Message | Sequence[Message],
    anchors: Anchors,
    manner: Manner,
    *,
    session_id: str | None = None,
    after: str | None = None,
    hint: str = "",
) -> Incoming:
    """A request to the tenant of ``anchors``. Raises UnknownTurn, ValueError for what is no message."""
    kind, tenant, tails = tools_digest(manner.tools), anchors.store.tenant, frozenset[str]()
    prompt, whole = None, None if isinstance(messages, str | Mapping) else messages
    if after is not None:
        whole = whole_history(anchors.branches.history(after), messages, branches=True)
    if whole is not None:
        prompt = edited_prompt(anchors.conversations, whole, manner)
        if prompt is not None:
            owner = (tenant, kind, hint)
            tails = tails_of(owner, anchor_ids(prompt), whole, anchors.calls, manner.tools)
    return Incoming(messages, tenant, session_id, after, manner, hint, kind, whole, prompt, tails)
