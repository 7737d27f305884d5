"""Chat messages in content, and their roles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kamera.errors import RoleNotSupported, UnreadableMedia, quote

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")

Turn = dict[str, Any]
"""A message: "role", "content" (a list of content items), and other entries that a template reads."""


def make_turns(role: str, text: str) -> list[Turn]:
    """One turn of text."""
    return [{"role": role, "content": [{"type": "text", "text": text}]}]


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
    if isinstance(value, Mapping):
        return [s for k, v in value.items() for s in (*strings_in(k), *strings_in(v))]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [s for v in value for s in strings_in(v)]
    return []
