"""What a chat template leaves out without a word: the model would answer another conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_not
from typing import Any

from kamera.errors import ModalityNotSupported, quote

_OTHER = "KAMERAOTHER"


class Vanishing:
    """Looks for tools, tool calls and roles that a template does not write; asks once for each that it does.

    ``name`` is the template's in messages, ``render`` its `ChatTemplate.render`.
    """

    def __init__(self, name: str, render: Callable[..., str]) -> None:
        self._name = name
        self._render = render
        self._visible_parts: set[str] = set()

    def check(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> None:
        """Raise ModalityNotSupported for a part of the conversation that the template leaves out.

        It does if the text without the part, or with another in its place, is the same. Raises it also for
        messages that the template refuses.
        """
        for part, others, other_tools in self._without(messages, tools):
            if part in self._visible_parts:
                continue
            whole = self._render(messages, tools=tools, generation=False)
            try:
                same = self._render(others, tools=other_tools, generation=False) == whole
            except ModalityNotSupported:
                same = False  # the template asks for it
            if same:
                raise ModalityNotSupported(
                    f"the chat template of {self._name} does not show {part}: leave them out, say it in "
                    "text, or give the processor a template that does"
                )
            self._visible_parts.add(part)

    def _without(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], Sequence[Any] | None]]:
        """Parts that may vanish, each with the conversation without it."""
        if tools:
            yield "tools", messages, None
        if any(message.get("tool_calls") for message in messages):
            yield "tool calls", [_without_calls(message) for message in messages], tools
        for role in dict.fromkeys(str(message.get("role")) for message in messages):
            if role in ("user", "assistant"):
                continue
            others = [_with_other_text(m) if m.get("role") == role else m for m in messages]
            if any(map(is_not, others, messages)):
                yield f"messages of the role {quote(role)}", others, tools


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _with_other_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with another text for its own; the message itself if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _OTHER} if content.strip() else message
    if isinstance(content, list | tuple) and any(map(_has_text, content)):
        return {**message, "content": [{**i, "text": _OTHER} if _has_text(i) else i for i in content]}
    return message


def _has_text(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("text"), str) and bool(item["text"].strip())
