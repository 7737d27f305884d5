"""Items of a conversation by their ids, as APIs name them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kamera.content import Message
from kamera.edits.directive import Directive, Mode
from kamera.errors import InvalidDirective, quote


def of_items(messages: Sequence[Message], names: Collection[str], mode: Mode = "repair") -> list[Directive]:
    """Directives that remove items: messages of an id, and calls with their results, of a call's id.

    A message leaves with all of its calls. Raises InvalidDirective for an id that no message has.
    """
    leaving: set[int] = set()
    for name in names:
        found = {at for at, message in enumerate(messages) if name in _ids(message)}
        if not found:
            raise InvalidDirective(f"no item {quote(name)} in {len(messages)} messages: give an id of theirs")
        leaving |= found
    calls = {name for at in leaving for name in _ids(messages[at])}
    leaving |= {at for at, message in enumerate(messages) if message.get("tool_call_id") in calls}
    starts = sorted(at for at in leaving if at - 1 not in leaving)
    stops = sorted(at + 1 for at in leaving if at + 1 not in leaving)
    return [Directive(a, b, mode=mode, unit="messages") for a, b in zip(starts, stops, strict=True)]


def _ids(message: Message) -> set[str]:
    calls = (call.get("id") for call in message.get("tool_calls") or ())
    return {str(name) for name in (message.get("id"), message.get("tool_call_id"), *calls) if name}
