"""Anthropic's context editing: the edits that a request asks for, and what they removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kamera.content import Conversations, Fields, Message
from kamera.edits.policies import clear_tool_results
from kamera.edits.policy import PolicyFunction
from kamera.errors import InvalidRequest

CLEAR = "clear_tool_uses_20250919"
"""The only edit that is known."""


@dataclass(frozen=True)
class Clearing:
    """Old tool results that leave once a prompt has ``trigger`` tokens, if that removes ``at_least``."""

    policy: PolicyFunction
    trigger: int
    at_least: int

    def apply(
        self, messages: list[Message], conversations: Conversations, tools: Sequence[Any] | None
    ) -> tuple[list[Message], dict[str, Any] | None]:
        """The messages after the edit, and the edit as it was applied; None if it was not.

        Raises the errors of `Conversations.render`.
        """
        before = conversations.render(messages, tools=tools).num_tokens
        if before < self.trigger:
            return messages, None
        left: list[Message] = list(self.policy(messages, 0))
        uses = sum(a != b for a, b in zip(messages, left, strict=True))
        removed = before - conversations.render(left, tools=tools).num_tokens
        if not uses or removed < self.at_least:
            return messages, None
        return left, {"type": CLEAR, "cleared_tool_uses": uses, "cleared_input_tokens": removed}


def clearing_of(management: Fields) -> Clearing | None:
    """The edit of ``context_management``; None without one. Raises InvalidRequest."""
    edits = management.objects("edits")
    management.finish()
    if not edits:
        return None
    if len(edits) > 1:
        place = management.place("edits")
        raise InvalidRequest(f"{place} has {len(edits)}: give one", place)
    edit = edits[0]
    kind = edit.need("type", str)
    if kind != CLEAR:
        raise edit.wrong("type", kind, CLEAR)
    keep, excluded = _amount(edit, "keep", "tool_uses", 3), edit.texts("exclude_tools", 128)
    trigger = _amount(edit, "trigger", "input_tokens", 100_000)
    at_least = _amount(edit, "clear_at_least", "input_tokens", 0)
    edit.accept_only(clear_tool_inputs=False)
    edit.finish()
    return Clearing(clear_tool_results(keep, exclude=excluded), trigger, at_least)


def _amount(edit: Fields, name: str, unit: str, default: int) -> int:
    given = edit.take_object(name, absent=True)
    given.accept_only(type=unit)
    value = given.count("value", 0)
    given.finish()
    return default if value is None else value
