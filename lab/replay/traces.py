"""Requests of public OpenTelemetry agent traces as sessions: what each agent sent, already edited by it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from lab.replay.scripts import picture_of
from lab.reuse.otel import Call, read_calls

Messages = list[dict[str, Any]]


def sessions(path: str | Path) -> dict[str, list[Messages]]:
    """The requests of each conversation in a trace, in the order of their starts.

    A trace holds digests of media: a picture of equal identity stands in for each. Tools are left out, since
    the backbones' templates take none. Requests whose conversation has no other are one of their service.
    Raises `TraceError`, and `TraceHole` for an incomplete request.
    """
    calls = read_calls(path).calls
    often = Counter(call.session for call in calls)
    found: dict[str, list[Messages]] = defaultdict(list)
    for call in calls:
        name = call.session if often[call.session] > 1 else ""
        found[f"{call.service} {name}".strip()].append(_messages(call))
    return dict(found)


def _messages(call: Call) -> Messages:
    out: Messages = []
    for message in call.messages:
        items: list[dict[str, Any]] = []
        for part in message.parts:
            if part.digest:
                items.append({"type": "image", "image": picture_of(random.Random(part.digest), 56)})
            elif part.text:
                items.append({"type": "text", "text": part.text})
        out.append({"role": message.role, "content": items})
    return out
