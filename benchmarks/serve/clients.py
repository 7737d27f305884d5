"""Agents' clients over a real server: each edits its own history and sends all of it.

They talk in turns to one server; the model says what the scripts' agents say. Written again is what ran
before a first token beyond the new tokens.
"""

from __future__ import annotations

import base64
import io
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import httpx
from PIL import Image

from benchmarks import report
from benchmarks.price.agents import Request, requests, thin
from benchmarks.price.counting import Dictated, watching
from benchmarks.price.scripts import AGENTS, Message
from benchmarks.serve.listening import serving
from kamera import ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.serve import Service
from kamera.serve.dialect import Asked

KEPT = 3


class Scripted(Service):
    """A service whose next answer is dictated."""

    dictated: Dictated

    def _options(self, asked: Asked) -> dict[str, Any]:
        return {**super()._options(asked), "logits_processor": [self.dictated]}


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each agent, with the session's id in its requests and without."""
    backbone = thin(options.layers)
    asked = {
        agent.name: list(requests(backbone, agent, KEPT, options.turns, options.side)) for agent in AGENTS
    }
    for ids in (True, False):
        yield from run(backbone, asked, ids)


def run(backbone: HfEngine, asked: dict[str, list[Request]], ids: bool) -> list[report.Row]:
    """All conversations over one server, in turns."""
    service = Scripted(backbone, ReusePolicy.exact())
    first: dict[str, list[int]] = {name: [] for name in asked}
    sessions: dict[str, set[str]] = {name: set() for name in asked}
    with serving(service) as url, watching(backbone) as ran, httpx.Client(verify=False, timeout=300) as http:
        for turn in range(max(map(len, asked.values()))):
            for name, some in asked.items():
                request = some[turn]
                service.dictated = Dictated(request.answer, ran)
                body = {"model": "served", "max_tokens": len(request.answer), "temperature": 0}
                body |= {"messages": [sent(m) for m in request.messages]}
                body |= {"session_id": name} if ids else {}
                answer = http.post(f"{url}/v1/chat/completions", json=body)
                answer.raise_for_status()
                told = answer.json()
                if told["usage"]["prompt_tokens"] != request.prompt:
                    raise AssertionError("the server's prompt is the session's")
                first[name].append(sum(service.dictated.first))
                sessions[name].add(told["kamera"]["session_id"])
    return [_row(name, some, first[name], sessions[name], ids) for name, some in asked.items()]


def _row(name: str, asked: list[Request], first: list[int], sessions: set[str], ids: bool) -> report.Row:
    again, theirs = (
        sum(max(0, tokens - request.new) for tokens, request in zip(ran, asked, strict=True))
        for ran in (first, [request.prefix for request in asked])
    )
    return {
        "agent": name,
        "id": "yes" if ids else "no",
        "requests": len(asked),
        "new": sum(r.new for r in asked),
        "prefix cache": sum(r.prefix for r in asked),
        "first, tokens": sum(first),
        "written again": again,
        "by a prefix cache": theirs,
        "sessions": len(sessions),
    }


def sent(message: Message) -> Message:
    """A message in OpenAI's form."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [_url(i["image"]) if i["type"] == "image" else i for i in content]}


def _url(image: Image.Image) -> Message:
    held = io.BytesIO()
    image.save(held, "PNG", compress_level=1)
    data = base64.b64encode(held.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
