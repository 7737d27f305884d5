"""Edit policies: functions from messages to the messages of the next turn, with checks of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kamera.content import Message, copy_message
from kamera.errors import EditPolicyFailed, first_line, quote

EditPolicy = Callable[[Sequence[Message], int], Sequence[Message]]
"""``policy(messages, turn) -> messages``: a pure function; ``turn`` counts requests from 0."""

PLAIN = (str, int, float, bool, type(None))
"""Types of the values in a message that are no media."""


def apply_policy(policy: EditPolicy, messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
    """The messages after ``policy``; the caller's own are not changed.

    Raises EditPolicyFailed, naming the policy, if it raises, returns anything but messages, modifies its
    arguments, or returns another result for equal arguments.
    """
    name = getattr(policy, "__name__", type(policy).__name__)
    given = [copy_message(m) for m in messages]
    first = _ask(policy, given, turn, name)
    if not same(given, messages):
        raise EditPolicyFailed(f"edit policy {name} modified the messages it was given: return new ones")
    if not same(_ask(policy, given, turn, name), first):
        raise EditPolicyFailed(
            f"edit policy {name} gives two results for equal arguments (turn {turn}): its result must depend "
            "on its arguments alone"
        )
    return first


def _ask(policy: EditPolicy, messages: list[dict[str, Any]], turn: int, name: str) -> list[dict[str, Any]]:
    try:
        answer = policy(messages, turn)
    except Exception as error:
        raise EditPolicyFailed(
            f"edit policy {name} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise EditPolicyFailed(
            f"edit policy {name} returned {type(answer).__name__}: return a list of messages"
        )
    for message in answer:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EditPolicyFailed(
                f"edit policy {name} returned {quote(message)}: a message is a dict with a role"
            )
    if not answer:
        raise EditPolicyFailed(f"edit policy {name} left no message: keep at least one")
    return [dict(message) for message in answer]


def same(one: Any, other: Any) -> bool:
    """Equality of messages or their parts; media are compared by identity, as arrays have no truth value."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, PLAIN) and isinstance(other, PLAIN):
        return one == other
    return one is other
