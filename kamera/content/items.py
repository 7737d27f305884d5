"""User content in any form, as chat turns of text, image and video items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kamera.content.turns import Turn, as_messages
from kamera.content.video import VIDEO_SUFFIXES, Clip
from kamera.errors import ModalityNotSupported, UnreadableMedia


def as_turns(content: Any) -> list[Turn]:
    """Content as turns; the default role is the user. Raises UnreadableMedia for other types."""
    messages = as_messages(content)
    if messages is None:
        return [{"role": "user", "content": _items(content)}]
    held = [message.get("content") for message in messages]
    return [
        {**message, "content": [] if content is None else _items(content)}
        for message, content in zip(messages, held, strict=True)
    ]


def text_turns(messages: Sequence[Mapping[str, Any]], place: str) -> list[Turn]:
    """Messages as turns of text alone. Raises ModalityNotSupported for media, naming the ``place``."""
    turns = as_turns(messages)
    media = sorted({i["type"] for turn in turns for i in turn["content"]} - {"text"})
    if media:
        raise ModalityNotSupported(
            f"a {place} holds {media}: it is text, append pictures and videos as chunks"
        )
    return turns


def _items(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if isinstance(content, Path):
        kind = "video" if content.suffix.lower() in VIDEO_SUFFIXES else "image"
        return [{"type": kind, kind: content}]
    if isinstance(content, Image.Image):
        return [{"type": "image", "image": content}]
    if isinstance(content, np.ndarray):
        kind = "video" if content.ndim == 4 else "image"
        return [{"type": kind, kind: content}]
    if isinstance(content, Clip):
        return [{"type": "video", "video": content}]
    if isinstance(content, Mapping):
        return [_checked(content)]
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        if content and all(isinstance(c, Image.Image | np.ndarray) for c in content):
            return [{"type": "video", "video": list(content)}]
        return [item for c in content for item in _items(c)]
    raise UnreadableMedia(
        f"{type(content).__name__} is not content: give text, an image, frames, a path, or chat content"
    )


def _checked(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type")
    if kind is None:
        kind = next((k for k in ("text", "image", "video") if k in item), None)
    if kind == "text" and isinstance(item.get("text"), str):
        return {"type": "text", "text": item["text"]}
    if kind in ("image", "video"):
        return {**item, "type": kind}
    raise UnreadableMedia(
        f"content item {dict(item)!r} is none of text, image, video: give "
        '{"type": "text", "text": …}, {"type": "image", "image": …} or {"type": "video", "video": …}'
    )
