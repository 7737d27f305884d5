"""Keep the last pictures: UI-TARS (5), cua (3), Agent-S (8), smolagents (2), Open-AutoGLM (0 of the past)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kamera.content import Message
from kamera.edits.policies.calls import without_calls
from kamera.edits.policy import EditPolicy
from kamera.errors import quote

_KINDS = ("image", "image_url")


def keep_last_images(
    n: int, placeholder: str | None = None, *, batch: int = 1, whole_turns: bool = False
) -> EditPolicy:
    """Remove all pictures except the ``n`` latest.

    ``placeholder`` replaces them (Agent-TARS writes "[Image omitted to conserve context]"); None leaves
    nothing, and a message of pictures only is removed whole. ``batch``: pictures are removed only when that
    many can be removed at once, which spares a prefix cache (OmniParser: 10). ``whole_turns``: the message of
    a removed picture leaves too, and the call whose result it was (cua; Agent-S on vLLM). Raises `ValueError`
    for a negative ``n``, a batch below 1, or whole turns with a placeholder.
    """
    if n < 0 or batch < 1:
        raise ValueError(f"n={n}, batch={batch}: keep 0 or more pictures, in batches of 1 or more")
    if whole_turns and placeholder is not None:
        raise ValueError(f"placeholder {quote(placeholder)} in turns that leave whole: give one of the two")

    def keep_last_images(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        total = sum(_is_image(item) for m in messages for item in _items(m))
        leaving = max(0, total - n) // batch * batch
        if whole_turns:
            return _without_turns(messages, leaving)
        out = []
        for message in messages:
            kept: list[Any] = []
            for item in _items(message):
                if leaving and _is_image(item):
                    leaving -= 1
                    if placeholder is not None:
                        kept.append({"type": "text", "text": placeholder})
                else:
                    kept.append(item)
            if not _items(message):
                out.append(dict(message))
            elif kept:
                out.append({**message, "content": kept})
        return out

    return keep_last_images


def _without_turns(messages: Sequence[Message], leaving: int) -> list[dict[str, Any]]:
    """Messages without those of the first ``leaving`` pictures, and without the calls they answer."""
    gone: set[int] = set()
    for i, message in enumerate(messages):
        here = sum(map(_is_image, _items(message)))
        if 0 < here <= leaving:
            gone.add(i)
            leaving -= here
    return without_calls(messages, gone)


def _items(message: Message) -> list[Any]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else []


def _is_image(item: Any) -> bool:
    return isinstance(item, dict) and (item.get("type") in _KINDS or ("type" not in item and "image" in item))
