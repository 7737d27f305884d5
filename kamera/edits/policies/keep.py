"""Keep everything, like Anthropic's computer-use demo, which never breaks a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kamera.content import Message
from kamera.edits.policy import EditPolicy


def keep_all() -> EditPolicy:
    """Keep every message unchanged."""

    def keep_all(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        return [dict(message) for message in messages]

    return keep_all
