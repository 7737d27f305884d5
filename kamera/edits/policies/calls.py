"""Tools' calls and results in messages: OpenAI's chat and Responses forms, Anthropic's blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kamera.content import Message, text_of


def without_calls(
    messages: Sequence[Message], gone: Collection[int], *, reasoning: bool = False
) -> list[dict[str, Any]]:
    """``messages`` without those at the indices ``gone``, and without the calls whose results they are.

    A result answers the latest call before it that has its id: some agents give all calls one id. A message
    of nothing but such calls is removed; where text beside them stays, calls without text that now follow
    it join it. ``reasoning``: text beside them leaves too, and a Responses ``reasoning`` item right before.
    """
    dead = _calls_of(messages, gone)
    lost = set(gone)
    if reasoning:
        before = {i - 1 for i in dead if i > 0 and _is_call(messages[i])}
        lost |= {i for i in before if messages[i].get("type") == "reasoning"}
    out: list[dict[str, Any]] = []
    text: dict[str, Any] | None = None  # what stays of a message whose calls have left
    for i, message in enumerate(messages):
        left = dict(message) if i not in dead else _without(message, dead[i], reasoning)
        if i in lost or left is None:
            continue
        if text is not None and left.get("tool_calls") and not left.get("content"):
            text["tool_calls"] = left["tool_calls"]
        else:
            out.append(left)
        text = left if i in dead and "tool_calls" not in left else None
    return out


def with_content(messages: Sequence[Message], contents: Mapping[int, Any]) -> list[dict[str, Any]]:
    """``messages``, with other content at these indices."""
    return [{**m, "content": contents[i]} if i in contents else dict(m) for i, m in enumerate(messages)]


def tool_results(messages: Sequence[Message]) -> dict[int, str | None]:
    """The indices of tools' messages, each with the tool's name: its own, or that of the call it answers."""
    called = {
        call.get("id"): (call.get("function") or {}).get("name")
        for m in messages
        for call in m.get("tool_calls") or []
    }
    tools = [(i, m) for i, m in enumerate(messages) if m.get("role") == "tool"]
    return {i: m.get("name") or called.get(m.get("tool_call_id")) for i, m in tools}


def is_result(message: Message) -> bool:
    """True for a message, or a Responses item, that is the result of a call."""
    return message.get("role") in ("tool", "function") or str(message.get("type")).endswith("_call_output")


def _is_call(message: Message) -> bool:
    """True for a Responses item that is a call."""
    return str(message.get("type")).endswith("_call")


def blocks_of(message: Message, kind: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Anthropic's blocks of this kind (``tool_use``, ``tool_result``) of a message, with their indices."""
    content = message.get("content")
    items = enumerate(content if isinstance(content, list | tuple) else [])
    return [(k, item) for k, item in items if isinstance(item, Mapping) and item.get("type") == kind]


def _calls_of(messages: Sequence[Message], results: Collection[int]) -> dict[int, set[Any]]:
    """The messages that made the calls of these results, each with the ids of the calls."""
    latest: dict[Any, int] = {}
    found: dict[int, set[Any]] = defaultdict(set)
    for i, message in enumerate(messages):
        if i in results:
            for name in _result_ids(message):
                if name in latest:
                    found[latest[name]].add(name)
        latest.update(dict.fromkeys(_call_ids(message), i))
    return found


def _call_ids(message: Message) -> list[Any]:
    """The ids of the calls that a message makes."""
    own = [message.get("call_id")] if _is_call(message) else []
    calls = [call.get("id") for call in message.get("tool_calls") or []]
    return [*own, *calls, *(block.get("id") for _, block in blocks_of(message, "tool_use"))]


def _result_ids(message: Message) -> list[Any]:
    """The ids of the calls whose results a message holds."""
    own = message.get("tool_call_id", message.get("call_id")) if is_result(message) else None
    blocks = [block.get("tool_use_id") for _, block in blocks_of(message, "tool_result")]
    return [name for name in (own, *blocks) if name is not None]


def _without(message: Message, calls: Collection[Any], reasoning: bool) -> dict[str, Any] | None:
    """A message without these calls; None if nothing of it is left."""
    if _is_call(message):
        return None
    out = dict(message)
    staying = [call for call in message.get("tool_calls") or [] if call.get("id") not in calls]
    if staying:
        out["tool_calls"] = staying
    else:
        out.pop("tool_calls", None)
    gone = {k for k, block in blocks_of(message, "tool_use") if block.get("id") in calls}
    if gone:
        out["content"] = [item for k, item in enumerate(message["content"]) if k not in gone]
    busy = bool(staying) or bool(blocks_of(out, "tool_use"))
    return out if busy or (text_of(out) and not reasoning) else None
