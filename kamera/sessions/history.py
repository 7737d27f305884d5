"""The history that a caller gives: whole, or its new messages alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kamera.content import Message, check_messages, copied


def whole_history(
    before: tuple[dict[str, Any], ...], messages: str | Message | Sequence[Message] | None, append: bool
) -> tuple[dict[str, Any], ...]:
    """The history ``before`` with new messages behind it, or the whole one given; as `ChatSession.send` says.

    Raises ValueError for what is no message.
    """
    if messages is None:
        return before
    if isinstance(messages, str):
        return (*before, {"role": "user", "content": messages})
    if isinstance(messages, Mapping):
        check_messages([messages])
        return (*before, copied(messages))
    check_messages(messages)
    given = tuple(copied(message) for message in messages)
    return (*before, *given) if append else given
