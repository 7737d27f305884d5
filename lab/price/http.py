"""``python -m lab.price http``: the six agents of ``agents``, and hermes-agent's case, over a real server.

Each agent's client edits its own history and sends all of it to ``/v1/chat/completions`` on loopback, with a
session's id or without one. The six talk in turns to one server, as `lab.price.agents` has them; the model
says what the scripts' agents say. Counted are tokens before the first token, what of them was written again
(all but new ones), later work, and sessions. ``difference`` is the largest of an answer's first logits, as a
share of those of the first way with ids: answers are dictated, and random weights have few of their own.

hermes-agent's case: 104 requests, 40 of which bring a picture, of which the newest three stay.

    python -m lab.price http --turns 50 --output docs/results/price-http.json
    python -m lab.price http --turns 50 --sabotage        # no conversation is known by its answers
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image

from kamera.content import Conversations
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from kamera.patches import later_of
from kamera.serve import Front, Keys, Service
from kamera.serve.dialect import Asked
from kamera.sessions.owners import Tails
from lab.price.agents import Request, Session, requests
from lab.price.counting import Ran, watching
from lab.price.scripts import AGENTS, Agent, Message
from lab.replay.shapes import thin
from lab.replay.ways import WAYS
from lab.results import keep
from lab.serving import listening
from lab.speed.machine import commit, machine

SERVED = ("exact", "default", "amortize")
PICTURES, REQUESTS, KEPT = 40, 104, 3


@dataclass
class Talk:
    """One conversation: what it sends, and turn by turn what it ran and the model's first logits."""

    agent: str
    asked: list[Request]
    first: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    weakest: set[str] = field(default_factory=set)


class Dictated:
    """A logits processor that lets the model say ``ids``; it notes what ran before, and the first logits."""

    def __init__(self, ids: Sequence[int], ran: Ran, start: int) -> None:
        self._ids, self._ran, self._start = list(ids), ran, start
        self.first = self._said = 0
        self.logits = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores that leave one token."""
        if not self._said:
            self.first = sum(self._ran.mine(self._start))  # those of this thread, which answers
            self.logits = scores[0].clone()
        token, self._said = self._ids[self._said], self._said + 1
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


class Scripted(Service):
    """A service whose next answer is dictated."""

    dictated: Dictated

    def _options(self, asked: Asked) -> dict[str, Any]:
        return {**super()._options(asked), "logits_processor": [self.dictated]}


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


def run(backbone: HfEngine, way: str, talks: Sequence[Talk], ids: bool) -> dict[str, Any]:
    """All conversations over one server, in turns."""
    service = Scripted(backbone, WAYS[way].policy, mode=WAYS[way].mode)
    started = time.perf_counter()
    with (
        listening(Front(service, Keys(), ["thin"])) as url,
        watching(backbone) as ran,
        httpx.Client(verify=False, timeout=300) as client,
    ):
        for turn in range(max(len(talk.asked) for talk in talks)):
            for talk in (talk for talk in talks if turn < len(talk.asked)):
                request = talk.asked[turn]
                service.dictated = Dictated(request.answer, ran, len(ran.spans))
                body = {"model": "thin", "max_tokens": len(request.answer), "temperature": 0}
                body |= {"messages": [sent(m) for m in request.messages]}
                body |= {"session_id": talk.agent} if ids else {}
                answer = client.post(f"{url}/v1/chat/completions", json=body)
                answer.raise_for_status()
                told = answer.json()
                if told["usage"]["prompt_tokens"] != request.prompt:
                    raise AssertionError("the server's prompt is the session's")
                talk.first.append(service.dictated.first)
                talk.logits.append(service.dictated.logits)
                talk.sessions.add(told["kamera"]["session_id"])
                talk.weakest.add(told["kamera"]["guarantee"])
                later_of(backbone).flush()
        answers = sum(len(request.answer) - 1 for talk in talks for request in talk.asked)
        later = sum(ran.spans) - sum(sum(talk.first) for talk in talks) - answers
        counts = service.counts()
    kept = {name: counts[name] for name in ("by_id", "by_owner", "by_prefix", "by_edit", "opened", "forked")}
    return {"later": later, "counts": kept, "seconds": round(time.perf_counter() - started, 1)}


def rows(talks: Sequence[Talk], truth: Sequence[Talk]) -> list[dict[str, Any]]:
    """A row for each conversation."""
    made = []
    for talk, exact in zip(talks, truth, strict=True):
        pairs = zip(talk.logits, exact.logits, strict=True)
        apart = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        new, prefix = (sum(getattr(r, name) for r in talk.asked) for name in ("new", "prefix"))
        again, theirs = (
            sum(max(0, t - r.new) for r, t in zip(talk.asked, tokens, strict=True))
            for tokens in (talk.first, [r.prefix for r in talk.asked])
        )
        made.append(
            {
                "agent": talk.agent,
                "requests": len(talk.asked),
                "new": new,
                "prefix cache": prefix,
                "before the first token": sum(talk.first),
                "written again": again,
                "written again by a prefix cache": theirs,
                "share of a prefix cache's": round(again / max(theirs, 1), 4),
                "sessions": len(talk.sessions),
                "difference": apart,
                "guarantees": sorted(talk.weakest),
            }
        )
    return made


def hermes() -> Agent:
    """An agent of 104 requests, 40 of which bring a picture: three, two, three, … requests apart."""
    shots = {round(i * REQUESTS / PICTURES) for i in range(PICTURES)}

    def seen(turn: int, shot: Any) -> list[Message]:
        text = {"type": "text", "text": f"Step {turn} is done: row {turn} was found in the list of files."}
        items = [{"type": "image", "image": shot(turn)}, text] if turn in shots else [text]
        return [{"role": "user", "content": items}]

    said = AGENTS[0].said
    opening = [{"role": "system", "content": "You use a computer. Sort the files."}]
    rule = lambda n, batch: policies.keep_last_images(n, batch=batch)  # noqa: E731
    return Agent("hermes-agent", "", lambda shot: opening, seen, said, rule)


def measured(backbone: HfEngine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs of the six, then of hermes-agent's case, by way, with ids and without."""
    conversations = Conversations(backbone.processor)
    six = [Session(a, KEPT, options.tokens, options.turns, 8) for a in AGENTS]
    alone = [Session(hermes(), KEPT, options.tokens, options.requests, 8)]
    for sessions in (six, alone):
        asked = [[*requests(backbone, conversations, session)] for session in sessions]
        truth: list[Talk] | None = None
        for way in options.ways:
            for ids in (given == "with" for given in options.ids):
                talks = [Talk(s.agent.name, r) for s, r in zip(sessions, asked, strict=True)]
                told = run(backbone, way, talks, ids)
                truth = truth or talks
                yield {"way": way, "ids": ids, **told, "rows": rows(talks, truth)}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """For people, as Markdown."""
    head = ["agent", "way", "id", "requests", "new", "prefix cache", "before the first token"]
    head += ["written again / a prefix cache's", "sessions", "difference", "later work of the run"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in runs:
        for row in one["rows"]:
            cells = [row["agent"], one["way"], "yes" if one["ids"] else "no", row["requests"]]
            cells += [f"{row[k]:,}" for k in ("new", "prefix cache", "before the first token")]
            again = f"{row['written again']:,} / {row['written again by a prefix cache']:,}"
            cells.append(again)
            cells += [row["sessions"], f"{row['difference']:.0e}", f"{one['later']:,}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m lab.price http", description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of hermes-agent's case")
    parser.add_argument("--tokens", type=int, default=64, help="of a picture: a square number")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=SERVED, default=SERVED)
    parser.add_argument("--ids", nargs="+", choices=("with", "without"), default=("with", "without"))
    parser.add_argument("--sabotage", action="store_true", help="no conversation is known by its answers")
    parser.add_argument("--output", type=Path, help="write JSON there, after each run")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.sabotage:
        Tails.give = lambda self, tails: frozenset()  # type: ignore[method-assign]
    given = {k: getattr(options, k) for k in ("turns", "requests", "tokens", "layers", "sabotage")}
    document: dict[str, Any] = {
        "commit": commit(),
        "machine": machine(),
        **given,
        "pictures": KEPT,
        "runs": [],
    }
    for one in measured(thin(options.layers, "thinking"), options):
        document["runs"].append(one)
        if options.output:
            keep(document, options.output)
        print(f"{one['way']} {'with' if one['ids'] else 'without'} ids: {one['seconds']} s", file=sys.stderr)
    print(table(document["runs"]))
