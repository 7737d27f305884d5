"""Old tool results and failed calls: Anthropic's clear_tool_uses, Qwen-Agent, Leyline, agents that retry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kamera.content import Message, text_of
from kamera.edits.policies.calls import tool_results, with_content, without_calls
from kamera.edits.policy import PolicyFunction, written


@written
def clear_tool_results(
    keep: int = 3,
    *,
    trigger: int = 0,
    exclude: Collection[str] = (),
    placeholder: str = "[old tool result cleared]",
) -> PolicyFunction:
    """Replace the results of tool calls, except the ``keep`` latest, by ``placeholder``; keep the calls.

    ``trigger``: characters of results in the conversation below which nothing is cleared. ``exclude``: names
    of tools whose results stay. Raises `ValueError` for a negative number.
    """
    if keep < 0 or trigger < 0:
        raise ValueError(f"keep={keep}, trigger={trigger} must not be negative")

    def clear_tool_results(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        results = tool_results(messages)
        clearable = [i for i, name in results.items() if name not in exclude]
        size = sum(len(text_of(messages[i])) for i in results)
        cleared = clearable[: max(0, len(clearable) - keep)] if size >= trigger else []
        return with_content(messages, dict.fromkeys(cleared, placeholder))

    return clear_tool_results


@written
def truncate_tool_results(keep: int = 2, *, head: int = 100, tail: int = 100) -> PolicyFunction:
    """Cut the middle out of tools' results, except of the ``keep`` latest.

    A result keeps its first ``head`` and last ``tail`` characters, with the number of those cut between them.
    Results with pictures stay. Raises `ValueError` for a negative number.
    """
    if min(keep, head, tail) < 0:
        raise ValueError(f"keep={keep}, head={head}, tail={tail} must not be negative")

    def truncate_tool_results(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        results = list(tool_results(messages))
        old = {i: messages[i].get("content") for i in results[: max(0, len(results) - keep)]}
        ends = {i: _ends(text, head, tail) for i, text in old.items() if isinstance(text, str)}
        return with_content(messages, ends)

    return truncate_tool_results


def _ends(text: str, head: int, tail: int) -> str:
    cut = len(text) - head - tail
    mark = f"\n[{cut} characters cut]\n"
    return text if cut <= len(mark) else text[:head] + mark + text[len(text) - tail :]


@written
def drop_failed_tool_calls(
    failed: Callable[[Message], bool] | None = None, *, keep_last: int = 1
) -> PolicyFunction:
    """Remove a failed call and its result after a later call of the same tool succeeded.

    ``failed`` is a predicate of a tool's message; by default it reads ``status`` and ``is_error``, or a text
    that begins with "error". The ``keep_last`` latest calls always stay.
    """
    judge = failed or _is_failure

    def drop_failed_tool_calls(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        names = tool_results(messages)
        spared = list(names)[-keep_last:] if keep_last else []
        good = {i for i in names if not judge(messages[i])}
        dead = {
            i for i in names.keys() - good - set(spared) if any(j > i and names[j] == names[i] for j in good)
        }
        return without_calls(messages, dead)

    return drop_failed_tool_calls


def _is_failure(message: Message) -> bool:
    if message.get("is_error") or message.get("status") == "error":
        return True
    return text_of(message).lstrip().lower().startswith("error")
