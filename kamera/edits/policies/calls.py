"""Messages without some tools' results, and without the calls that they answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kamera.content import Message


def without_calls(messages: Sequence[Message], gone: Collection[int]) -> list[dict[str, Any]]:
    """``messages`` without those at the indices ``gone``, and without the calls whose results they are.

    A message of nothing but such calls is removed.
    """
    calls = {messages[i].get("tool_call_id") for i in gone} - {None}
    out = []
    for i, message in enumerate(messages):
        if i in gone:
            continue
        asked = message.get("tool_calls") or []
        left = [call for call in asked if call.get("id") not in calls]
        if len(left) == len(asked):
            out.append(dict(message))
        elif left or text_of(message):
            kept = {k: v for k, v in message.items() if k != "tool_calls"}
            out.append({**kept, "tool_calls": left} if left else kept)
    return out


def text_of(message: Message) -> str:
    """The text of a message, its parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    items = content if isinstance(content, list | tuple) else []
    return "".join(i.get("text", "") for i in items if isinstance(i, dict))
