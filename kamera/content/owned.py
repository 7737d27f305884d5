"""Media that a conversation owns: they stay what they were, whatever becomes of a caller's object or file."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from kamera.content.items import kind_of, media_item
from kamera.content.limits import DEFAULT_LIMITS, MediaLimits
from kamera.content.media import SOURCES, Medium, bytes_of, load_image, local_path, read_file
from kamera.content.template import Message, copy_message
from kamera.content.video import SAMPLING, Clip, load_clip
from kamera.errors import quote

_FROZEN = Medium | bytes | None


def own_messages(messages: Any, limits: MediaLimits = DEFAULT_LIMITS) -> Any:
    """Messages, or one, whose media nobody else can change, in copies; anything else as it is.

    Items keep their form: each source is replaced where it stands. A file is read now, pixels are copied
    once; what is owned already is shared. Raises UnreadableMedia and ValueError for what cannot be read.
    """
    if isinstance(messages, Mapping):
        return _own_message(messages, limits)
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return [_own_message(m, limits) if isinstance(m, Mapping) else m for m in messages]
    return messages


def shown_message(message: Message) -> dict[str, Any]:
    """A copy of a message for its client, who may write to the media in it."""
    copy: dict[str, Any] = _opened(copy_message(message))
    return copy


def own_item(item: Any, limits: MediaLimits = DEFAULT_LIMITS) -> Any:
    """A content item with a medium that nobody else can change; an item of text as it is."""
    kind = kind_of(item)
    if kind not in SOURCES:
        return item
    url = f"{kind}_url"
    if isinstance(item.get(url), Mapping):
        return {**item, url: {**item[url], "url": _own(item[url].get("url"), kind, {}, limits)}}
    place = next((name for name in (url, *SOURCES[kind]) if item.get(name) is not None), None)
    if place is None:
        return item
    source = item[place]
    medium = _own(source, kind, media_item(item, kind), limits)
    taken = isinstance(medium, Medium) and isinstance(medium.held, Clip) and not isinstance(source, Medium)
    return {name: value for name, value in item.items() if not (taken and name in SAMPLING)} | {place: medium}


def _own_message(message: Message, limits: MediaLimits) -> dict[str, Any]:
    out = copy_message(message)
    content = message.get("content")
    if isinstance(content, list | tuple):
        out["content"] = [own_item(item, limits) for item in out["content"]]
    return out


def _own(source: Any, kind: str, item: Mapping[str, Any], limits: MediaLimits) -> Any:
    """The source itself if nothing can change it; else its bytes, or its pixels."""
    if isinstance(source, _FROZEN) or (isinstance(source, str) and source[:5].lower() == "data:"):
        return source
    if isinstance(source, bytearray | memoryview) or hasattr(source, "read"):
        return Medium(kind, bytes_of(source, limits))
    if isinstance(source, str | os.PathLike):
        path = local_path(source, kind)
        if kind == "image" or not os.path.isfile(path) or path.stat().st_size <= limits.file:
            return Medium(kind, read_file(path, kind, limits), quote(path))
    if kind == "image":
        return Medium(kind, load_image(source, limits=limits))
    options = {name: item[name] for name in SAMPLING if name in item}
    return Medium(kind, _apart(load_clip({**options, "video": source}, limits=limits)))


def _apart(clip: Clip) -> Clip:
    """A clip of its own pixels."""
    return replace(clip, frames=tuple(frame.copy() for frame in clip.frames))


def _opened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _opened(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_opened(inner) for inner in value]
    if not isinstance(value, Medium):
        return value
    if isinstance(value.held, Image.Image):
        return value.held.copy()
    if isinstance(value.held, Clip):
        return _apart(value.held)
    return Image.open(io.BytesIO(value.held)) if value.kind == "image" else value.held
