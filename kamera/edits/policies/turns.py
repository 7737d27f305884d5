"""Whole turns: keep all, keep head and tail (Agent-S on vLLM), or replace the middle by a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kamera.content import Message
from kamera.edits.policy import PolicyFunction, written


@written
def keep_all() -> PolicyFunction:
    """Keep every message unchanged: Anthropic's computer-use demo, which never breaks a prefix cache."""

    def keep_all(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        return [dict(message) for message in messages]

    return keep_all


@written
def keep_ends(head: int, tail: int) -> PolicyFunction:
    """Keep the first ``head`` and the last ``tail`` messages, and system messages.

    A tool's result is removed with its call. Raises `ValueError` unless both are 0 or more and ``tail`` is
    at least 1.
    """
    _check(head, tail)

    def keep_ends(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        middle = _middle_indices(messages, head, tail)
        return [dict(m) for i, m in enumerate(messages) if i not in middle]

    return keep_ends


@written
def summarise(
    head: int,
    tail: int,
    stub: str | Callable[[Sequence[Message]], str] = "[earlier messages were summarised]",
    *,
    role: str = "user",
) -> PolicyFunction:
    """As `keep_ends`, with one message for the middle: ``stub``, or its result for these messages."""
    _check(head, tail)

    def summarise(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        middle = _middle_indices(messages, head, tail)
        out: list[dict[str, Any]] = []
        for i, message in enumerate(messages):
            if i not in middle:
                out.append(dict(message))
            elif i == min(middle):
                gone = [messages[j] for j in sorted(middle)]
                out.append({"role": role, "content": stub(gone) if callable(stub) else stub})
        return out

    return summarise


def _check(head: int, tail: int) -> None:
    if head < 0 or tail < 1:
        raise ValueError(f"head={head}, tail={tail}: keep at least 0 messages at the start and 1 at the end")


def _middle_indices(messages: Sequence[Message], head: int, tail: int) -> set[int]:
    count = len(messages)
    stop = max(head, count - tail)
    while stop > head and stop < count and messages[stop].get("role") == "tool":
        stop -= 1  # a result does not stay without its call
    while head < stop and messages[head].get("role") == "tool" and head > 0:
        head += 1  # nor a call without its result
    return {i for i in range(head, stop) if messages[i].get("role") != "system"}
