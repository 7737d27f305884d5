"""Tool calls in an answer, by the convention of most open templates."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def tool_calls(text: str) -> tuple[dict[str, Any], ...]:
    """The calls between ``<tool_call>`` tags (Hermes, Qwen), in the format of OpenAI's messages.

    Anything but a JSON object with a name stays text.
    """
    found: list[dict[str, Any]] = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            function = {"name": call["name"], "arguments": call.get("arguments", {})}
            found.append({"id": f"call_{len(found)}", "type": "function", "function": function})
    return tuple(found)
