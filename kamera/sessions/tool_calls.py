"""Tool calls in an answer, by the convention that most open templates share."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def tool_calls(text: str) -> tuple[dict[str, Any], ...]:
    """The calls between ``<tool_call>`` tags (Hermes, Qwen), as OpenAI's messages hold them.

    What is no JSON object with a name is left in the text and is no call.
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
