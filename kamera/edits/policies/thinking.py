"""Strip thinking, as the templates of Qwen3 and DeepSeek do, and agents with other templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kamera.content import Message
from kamera.edits.policy import PolicyFunction, written

_FIELDS = ("reasoning_content", "reasoning", "thinking")


@written
def strip_thinking(*, keep_last: int = 0, tag: str = "think") -> PolicyFunction:
    """Remove thinking from the assistant's messages except the ``keep_last`` latest.

    Covers ``<think>…</think>`` in the text and the fields in which servers return thinking.
    """
    if keep_last < 0:
        raise ValueError(f"keep_last={keep_last} must not be negative")
    block = re.compile(rf"<{re.escape(tag)}>.*?</{re.escape(tag)}>\s*", re.DOTALL)

    def strip_thinking(messages: Sequence[Message], turn: int) -> list[dict[str, Any]]:
        own = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        old = own[: max(0, len(own) - keep_last)]
        return [_strip(m, block) if i in old else dict(m) for i, m in enumerate(messages)]

    return strip_thinking


def _strip(message: Message, block: re.Pattern[str]) -> dict[str, Any]:
    out = {name: value for name, value in message.items() if name not in _FIELDS}
    content = out.get("content")
    if isinstance(content, str):
        out["content"] = block.sub("", content)
    elif isinstance(content, list | tuple):
        out["content"] = [
            {**i, "text": block.sub("", i["text"])} if isinstance(i, dict) and "text" in i else i
            for i in content
        ]
    return out
