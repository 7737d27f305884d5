"""Tool calls in an answer, by the convention of most open templates."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)

CALL = "<tool_call>"
"""What a call in an answer begins with."""

Calls = tuple[dict[str, Any], ...]


def tool_calls(text: str) -> tuple[str, Calls]:
    """The text outside of calls, and the calls between ``<tool_call>`` tags (Hermes, Qwen) as OpenAI's.

    Their ids do not repeat. Anything but a JSON object with a name stays text.
    """
    rest, found, end = "", list[dict[str, Any]](), 0
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match[1])
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            function = {"name": call["name"], "arguments": call.get("arguments", {})}
            found.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
            rest, end = rest + text[end : match.start()], match.end()
    return rest + text[end:], tuple(found)
