"""User content in any form, as chat turns of text, image and video items, and the roles of turns."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from kamera.content.limits import SIZES
from kamera.content.media import SOURCES, bytes_of, find_media, kind_of_file, moves
from kamera.content.video import SAMPLING, Clip
from kamera.errors import ModalityNotSupported, RoleNotSupported, UnreadableMedia, quote

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_KINDS = ("text", "image", "video", "image_url", "video_url")


Turn = dict[str, Any]
"""A message: "role", "content" (text as it was given, or a list of items), other entries for a template."""


def make_turns(role: str, text: str) -> list[Turn]:
    """One turn of text."""
    return [{"role": role, "content": text}]


def as_messages(content: Any) -> list[Mapping[str, Any]] | None:
    """``content`` as messages, if it is one or a list of them; None for other content.

    Raises UnreadableMedia for a list of messages and other items.
    """
    if isinstance(content, Mapping):
        return [content] if "role" in content else None
    if not isinstance(content, Sequence) or isinstance(content, str | bytes | bytearray | memoryview):
        return None
    roles = sum(isinstance(c, Mapping) and "role" in c for c in content)
    if roles and roles < len(content):
        raise UnreadableMedia(
            f"a list of {roles} messages and {len(content) - roles} other things: give messages, or content"
        )
    return list(content) if roles else None


def check_role(role: Any) -> str:
    """``role``, if a template may contain it. Raises RoleNotSupported for anything but a plain name."""
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise RoleNotSupported(f"role {quote(role)} is not a name: give system, user, assistant or tool")
    return role


def strings_in(value: Any) -> list[str]:
    """Every string in a nested value, names of entries included."""
    if isinstance(value, str):
        return [value]
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = chain.from_iterable(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        parts = value
    strings: list[str] = []
    for part in parts:
        strings += [part] if isinstance(part, str) else strings_in(part)
    return strings


def as_turns(content: Any) -> list[Turn]:
    """Content as turns; the default role is the user. Raises UnreadableMedia for other types.

    A string that names a picture or a video is that (`find_media`), but in a message or as a text item it is
    text: those may be a client's.
    """
    messages = as_messages(content)
    if messages is None:
        return [{"role": "user", "content": _items(content)}]
    contents = ["" if message.get("content") is None else message["content"] for message in messages]
    return [
        {**message, "content": content if isinstance(content, str) else _items(content, names=False)}
        for message, content in zip(messages, contents, strict=True)
    ]


def items_of(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The content of a turn as items; none of an empty text."""
    content = turn["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    items: list[dict[str, Any]] = content
    return items


def text_turns(messages: Sequence[Mapping[str, Any]], place: str) -> list[Turn]:
    """Messages as turns of text alone. Raises ModalityNotSupported for media, naming the ``place``."""
    turns = as_turns(messages)
    media = sorted({i["type"] for turn in turns for i in items_of(turn)} - {"text"})
    if media:
        raise ModalityNotSupported(
            f"a {place} holds {media}: it is text, append pictures and videos as chunks"
        )
    return turns


def kind_of(item: Any) -> str | None:
    """The kind of a chat item: text, image or video, also in OpenAI's form; None if it is none."""
    if not isinstance(item, Mapping):
        return None
    kind = item.get("type") or next((k for k in _KINDS if k in item), None)
    if kind == "text":
        return "text" if isinstance(item.get("text"), str) else None
    return str(kind).removesuffix("_url") if kind in _KINDS else None


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's parts."""
    content = message.get("content")
    items = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = [item.get("text") for item in items if isinstance(item, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, its parts joined."""
    return "".join(texts_of(message))


def media_item(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A picture or video item in the form ``{"type": kind, kind: source}``, its other entries kept."""
    name = f"{kind}_url"
    if name not in item:
        return {**item, "type": kind}
    source = item[name]
    rest = {key: value for key, value in item.items() if key not in (name, "type")}
    return {**rest, "type": kind, kind: source.get("url") if isinstance(source, Mapping) else source}


def own_entries(item: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a picture or video item that Kamera does not know: the chat template may read them."""
    kind = kind_of(item)
    if kind not in SOURCES:  # a text, whose entries are all the template's
        return {}
    known = {"type", f"{kind}_url", *SOURCES[kind], *SIZES, *(SAMPLING if kind == "video" else ())}
    return {name: value for name, value in item.items() if name not in known}


def no_item_message(item: Any) -> str:
    """The message for a value that is no chat item."""
    kinds = (item.get("type"), *item) if isinstance(item, Mapping) else ()
    if any(isinstance(kind, str) and "audio" in kind for kind in kinds):
        return (
            f"content item {quote(item)} is audio, of which Kamera keeps no KV: give its transcript as "
            "text, or leave it out"
        )
    return (
        f"content item {quote(item)} is none of text, image, video: give "
        '{"type": "text", "text": …}, {"type": "image", "image": …} or {"type": "video", "video": …}'
    )


def is_picture(content: Any) -> bool:
    """True for a picture in memory: a PIL image, an array, a tensor, a file's bytes, or an open file."""
    types = Image.Image | np.ndarray | torch.Tensor | bytes | bytearray | memoryview
    return isinstance(content, types) or hasattr(content, "read")


def _moves(content: Any) -> bool:
    """True for the bytes, or the open file, of an animated picture; for others their place stays."""
    if isinstance(content, bytes | bytearray | memoryview):
        return moves(io.BytesIO(content))
    if not hasattr(content, "seek") or isinstance(content, Image.Image):
        return False
    return moves(io.BytesIO(bytes_of(content)))


def _items(content: Any, *, names: bool = True) -> list[dict[str, Any]]:
    if isinstance(content, str):
        media = find_media(content) if names else None
        return [media or {"type": "text", "text": content}] if content else []
    if isinstance(content, os.PathLike):
        kind = kind_of_file(Path(content))
        return [{"type": kind, kind: content}]
    if is_picture(content):
        kind = "video" if getattr(content, "ndim", 0) == 4 or _moves(content) else "image"
        return [{"type": kind, kind: content}]
    if isinstance(content, Clip):
        return [{"type": "video", "video": content}]
    if isinstance(content, Mapping):
        return [_check(content)]
    if isinstance(content, Sequence):
        if content and all(map(is_picture, content)):
            return [{"type": "video", "video": list(content)}]
        return [item for c in content for item in _items(c, names=names)]
    raise UnreadableMedia(
        f"{type(content).__name__} is not content: give text, an image, frames, a path, or chat content"
    )


def _check(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = kind_of(item)
    if kind is None:
        raise UnreadableMedia(no_item_message(item))
    return {"type": "text", "text": item["text"]} if kind == "text" else media_item(item, kind)
