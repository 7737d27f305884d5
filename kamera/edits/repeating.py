"""An edit of a client's own, repeated: what it will probably do to its history next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kamera.content import Message
from kamera.edits.policy import same


class Foreseen(NamedTuple):
    """A next history; its messages from index ``known`` on may come otherwise."""

    messages: list[dict[str, Any]]
    known: int


class _Change(NamedTuple):
    """A message ``old`` left, or became ``new``; ``distance`` from the end of the history."""

    distance: int
    old: Message
    new: Message | None


def repeated(
    before: Sequence[Message], given: Sequence[Message], history: Sequence[Message]
) -> Foreseen | None:
    """``history`` after an edit of the shape of the last one; None if that was none.

    That one made ``given``, less the new messages at its end, out of the history ``before``. It is repeated
    on the messages as far from the end of ``history``. One that changed in a way that its own content
    decides (a summary, a call that was read out of an answer) cannot be foretold.
    """
    out: list[dict[str, Any] | None] = [dict(message) for message in history]
    known = len(out)
    changes = _changes(before, given)
    for change in changes:
        at = len(history) - change.distance
        if at < 0:
            continue
        made = None if change.new is None else _change_like(change.old, change.new, history[at])
        if change.new is not None and made is None:
            known = min(known, at)
        else:
            out[at] = made
    left = [message for message in out if message is not None]
    if not changes:
        return None
    return Foreseen(left, sum(message is not None for message in out[:known]))


def _changes(before: Sequence[Message], given: Sequence[Message]) -> list[_Change]:
    """What became of the messages ``before``; new ones at the end of ``given`` are no change."""
    found: list[_Change] = []
    at = 0
    for i, old in enumerate(before):
        new = given[at] if at < len(given) else None
        if new is not None and same(old, new):
            at += 1
            continue
        left = new is None or new.get("role") != old.get("role") or any(same(m, new) for m in before[i + 1 :])
        found.append(_Change(len(before) - i, old, None if left else new))
        at += not left
    return found


def _change_like(old: Message, new: Message, other: Message) -> dict[str, Any] | None:
    """``other`` changed as ``old`` was into ``new``; None if that cannot be told."""
    keys = {key for key in (*old, *new) if key != "content"}
    if any(not same(old.get(key), new.get(key)) for key in keys):
        return None
    was, became, content = old.get("content"), new.get("content"), other.get("content")
    if isinstance(became, str) and isinstance(was, str) and isinstance(content, str):
        return {**other, "content": became}
    if not (isinstance(was, list) and isinstance(content, list) and _kinds(was) == _kinds(content)):
        return None
    if isinstance(became, str):
        return {**other, "content": became}
    if not isinstance(became, list):
        return None
    out: list[Any] = []
    place = 0
    for item in became:
        kept = next((k for k in range(place, len(was)) if same(was[k], item)), None)
        out.append(item if kept is None else content[kept])
        place = place if kept is None else kept + 1
    return {**other, "content": out}


def _kinds(content: Sequence[Any]) -> list[Any]:
    return [item.get("type") if isinstance(item, dict) else type(item) for item in content]
