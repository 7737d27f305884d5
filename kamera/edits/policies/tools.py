"""Old tool results and failed calls: Anthropic's clear_tool_uses, Qwen-Agent, Leyline, agents that retry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kamera.content import Message
from kamera.edits.policies.calls import text_of, without_calls
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
        size = sum(len(text_of(messages[i])) for i in results)
        cleared = set(clearable[: max(0, len(clearable) - keep)]) if size >= trigger else set()
        return [
            {**message, "content": placeholder} if i in cleared else dict(message)
            for i, message in enumerate(messages)
        ]

    return clear_tool_results


def truncate_tool_results(keep: int = 2, *, head: int = 100, tail: int = 100) -> EditPolicy:
    """Cut the middle out of tools' results, except of the ``keep`` latest.

    A result keeps its first ``head`` and last ``tail`` characters, with the number of those cut between them.
    Results with pictures stay. Raises `ValueError` for a negative number.
    """
    if min(keep, head, tail) < 0:
        raise ValueError(f"keep={keep}, head={head}, tail={tail} must not be negative")

    def truncate_tool_results(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        results = [i for i, m in enumerate(messages) if m.get("role") == "tool"]
        old = set(results[: max(0, len(results) - keep)])
        return [
            {**m, "content": _ends(m["content"], head, tail)}
            if i in old and isinstance(m.get("content"), str)
            else dict(m)
            for i, m in enumerate(messages)
        ]

    return truncate_tool_results


def _ends(text: str, head: int, tail: int) -> str:
    cut = len(text) - head - tail
    mark = f"\n[{cut} characters cut]\n"
    return text if cut <= len(mark) else text[:head] + mark + text[len(text) - tail :]


def drop_failed_tool_calls(
    failed: Callable[[Message], bool] | None = None, *, keep_last: int = 1
) -> EditPolicy:
    """Remove a failed call and its result after a later call of the same tool succeeded.

    ``failed`` is a predicate of a tool's message; by default it reads ``status`` and ``is_error``, or a text
    that begins with "error". The ``keep_last`` latest calls always stay.
    """
    judge = failed or _is_failure

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
        return without_calls(messages, dead)

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


def _is_failure(message: Message) -> bool:
    if message.get("is_error") or message.get("status") == "error":
        return True
    return text_of(message).lstrip().lower().startswith("error")
