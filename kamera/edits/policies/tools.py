"""Old tool results and failed calls: Anthropic's clear_tool_uses, Qwen-Agent, coding agents that retry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kamera.content import Message
from kamera.edits.policy import EditPolicy


def clear_tool_results(
    keep: int = 3,
    *,
    trigger: int = 0,
    exclude: Collection[str] = (),
    placeholder: str = "[old tool result cleared]",
) -> EditPolicy:
    """Replace the results of tool calls, except the ``keep`` latest, by ``placeholder``; keep the calls.

    ``trigger``: characters of results in the conversation below which nothing is cleared. ``exclude``: names
    of tools whose results stay. Raises `ValueError` for a negative number.
    """
    if keep < 0 or trigger < 0:
        raise ValueError(f"keep={keep}, trigger={trigger} must not be negative")

    def clear_tool_results(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        names = _tool_names(messages)
        results = [i for i, m in enumerate(messages) if m.get("role") == "tool"]
        clearable = [i for i in results if names.get(i) not in exclude]
        size = sum(len(_text(messages[i])) for i in results)
        cleared = set(clearable[: max(0, len(clearable) - keep)]) if size >= trigger else set()
        return [
            {**message, "content": placeholder} if i in cleared else dict(message)
            for i, message in enumerate(messages)
        ]

    return clear_tool_results


def drop_failed_tool_calls(
    failed: Callable[[Message], bool] | None = None, *, keep_last: int = 1
) -> EditPolicy:
    """Remove a failed call and its result after a later call of the same tool succeeded.

    ``failed`` is a predicate of a tool's message; by default it reads ``status`` and ``is_error``, or a text
    that begins with "error". The ``keep_last`` latest calls always stay.
    """
    judge = failed or _failed

    def drop_failed_tool_calls(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        names = _tool_names(messages)
        results = [i for i, m in enumerate(messages) if m.get("role") == "tool"]
        spared = set(results[len(results) - keep_last :]) if keep_last else set()
        good = {i for i in results if not judge(messages[i])}
        dead = {
            i
            for i in results
            if i not in good and i not in spared and any(j > i and names.get(j) == names.get(i) for j in good)
        }
        calls = {messages[i].get("tool_call_id") for i in dead} - {None}
        out = []
        for i, message in enumerate(messages):
            if i in dead:
                continue
            asked = message.get("tool_calls") or []
            left = [call for call in asked if call.get("id") not in calls]
            if len(left) == len(asked):
                out.append(dict(message))
            elif left or _text(message):
                kept = {k: v for k, v in message.items() if k != "tool_calls"}
                out.append({**kept, "tool_calls": left} if left else kept)
        return out

    return drop_failed_tool_calls


def _tool_names(messages: Sequence[Message]) -> dict[int, str | None]:
    """The tool's name of each tool message, from the message or from the call it answers."""
    called = {
        call.get("id"): (call.get("function") or {}).get("name")
        for m in messages
        for call in m.get("tool_calls") or []
    }
    return {
        i: m.get("name") or called.get(m.get("tool_call_id"))
        for i, m in enumerate(messages)
        if m.get("role") == "tool"
    }


def _failed(message: Message) -> bool:
    if message.get("is_error") or message.get("status") == "error":
        return True
    return _text(message).lstrip().lower().startswith("error")


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    items = content if isinstance(content, list | tuple) else []
    return "".join(i.get("text", "") for i in items if isinstance(i, dict))
