"""``python -m lab.price agents``: six agents that drop old pictures, counted by hooks on the model.

Each agent's client edits its own history before each request and sends all of it (`lab.price.scripts`). The
model is a Qwen2.5-VL of thin layers and random weights; a logits processor lets it say what the script's
agent says, so that all ways of caching answer the same requests. Counted by turn, over all threads: forwards
and tokens before the first token, and the later work, which is done before the next request. Beside them:

* a prefix cache that keeps encodings: one forward over the tokens behind the longest common prefix of the
  prompt with the prompt before and its answer (but for the answer's last token, which no forward ran);
* the same cache under a client that removes pictures in batches of ``--batch``, and so sends longer prompts;
* the new tokens: what the turn adds to the same conversation unedited.

    python -m lab.price agents --turns 50 --pictures 1 3 5 8 --tokens 256 1444 --layers 28 --output FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from kamera.content import Conversations
from kamera.edits import apply_policy
from kamera.engines.hf import HfEngine
from lab.price.counting import Dictated, named, shared, watching
from lab.price.scripts import AGENTS, Agent, Message
from lab.replay.scripts import picture_of
from lab.replay.shapes import thin
from lab.replay.ways import WAYS, Way
from lab.results import keep
from lab.speed.machine import commit, machine


@dataclass(frozen=True)
class Request:
    """What a client sends at a turn, the tokens that are to be said, and what caches prefill for it.

    ``prefix`` and ``batched`` are tokens of a prefix cache, ``prompt`` and ``longer`` the lengths of the two
    prompts, ``new`` the tokens that the turn adds to the unedited conversation.
    """

    messages: list[Message]
    answer: list[int]
    prompt: int
    longer: int
    prefix: int
    batched: int
    new: int


@dataclass
class Turns:
    """Forwards, tokens and encodes before the first token, and of all later work, turn by turn."""

    first: list[tuple[int, int, int]] = field(default_factory=list)
    later: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """An agent that keeps ``pictures`` of ``tokens`` tokens each for a number of turns."""

    agent: Agent
    pictures: int
    tokens: int
    turns: int
    batch: int


def requests(backbone: HfEngine, conversations: Conversations, asked: Session) -> Iterator[Request]:
    """What the agent's client sends, turn by turn."""
    shot, agent, n = _shots(8 * math.isqrt(asked.tokens)), asked.agent, asked.pictures
    placeholder = int(backbone.model.config.image_token_id)
    rules = (agent.rule(n, agent.batch), agent.rule(n, max(asked.batch, agent.batch)), None)
    cached: list[list[Hashable]] = [[], [], []]
    for turn in range(asked.turns):
        history = agent.history(turn, shot)
        sent = [history if rule is None else apply_policy(rule, history, turn) for rule in rules]
        said = _said(conversations, sent[0], agent.said(turn))
        prompts = [named(conversations.render(m), placeholder) for m in sent]
        run = [len(p) - shared(c, p) for c, p in zip(cached, prompts, strict=True)]
        yield Request(sent[0], said, len(prompts[0]), len(prompts[1]), *run)
        cached = [[*p, *said[:-1]] for p in prompts]


def _shots(side: int) -> Callable[[int], Image.Image]:
    @cache
    def shot(number: int) -> Image.Image:
        return picture_of(random.Random(number), side)

    return shot


def _said(conversations: Conversations, sent: list[Message], answer: Message) -> list[int]:
    """The tokens of an answer, up to the one that ends its turn, as the template writes them."""
    ids = conversations.render(sent).ids.tolist()
    closed = conversations.render([*sent, answer, {"role": "user", "content": "x"}]).ids.tolist()
    if closed[: len(ids)] != ids:
        raise AssertionError("an answer continues its prompt")
    (end,) = conversations.tokenize("<|im_end|>")
    return closed[len(ids) : closed.index(end, len(ids)) + 1]


def run(backbone: HfEngine, asked: Sequence[Request], way: Way) -> Turns:
    """One session of these requests."""
    turns = Turns()
    session = way.session(backbone)
    with watching(backbone) as ran:
        for request in asked:
            start, encoded = len(ran.spans), ran.encodes
            dictated = Dictated(request.answer, ran)
            options: dict[str, Any] = {"logits_processor": [dictated], "max_new_tokens": len(request.answer)}
            session.send(request.messages, do_sample=False, **options)
            way.between(session)
            first = ran.mine(start, dictated.before)  # later work may run beside the request
            turns.first.append((len(first), sum(first), dictated.encodes - encoded))
            every, answer = ran.spans[start:], len(request.answer) - 1
            later = len(every) - len(first) - answer, sum(every) - sum(first) - answer
            turns.later.append((*later, ran.encodes - dictated.encodes))
    return turns


def told(asked: Sequence[Request], turns: Turns) -> dict[str, Any]:
    """Sums of a session's turns (forwards, tokens, encodes), and the turns that miss a goal."""
    ran = [(r, f, t) for r, (f, t, _) in zip(asked, turns.first, strict=True)]
    over = [
        {"turn": i, "forwards": f, "tokens": t, "prefix cache": r.prefix, "new": r.new}
        for i, (r, f, t) in enumerate(ran)
        if t > r.prefix or f > 2
    ]
    left = next((i for i, (r, *_) in enumerate(ran) if r.prefix > r.new), len(ran))
    whole = {"before the first token": turns.first, "later": turns.later}
    sums = {name: [*map(sum, zip(*counts, strict=True))] for name, counts in whole.items()}
    return sums | {
        "most forwards": max(f for _, f, _ in ran),
        "most forwards after the first turn": max((f for _, f, _ in ran[1:]), default=0),
        "of prefix cache": _share(ran, "prefix"),
        "of prefix cache after the first turn": _share(ran[1:], "prefix"),
        "of new": _share(ran, "new"),
        "of new after the first turn": _share(ran[1:], "new"),
        "of new after the first departure": _share(ran[left + 1 :], "new"),
        "turns over a prefix cache, or of more than 2 forwards": len(over),
        "the dearest of them": sorted(over, key=lambda o: o["prefix cache"] - o["tokens"])[:3],
    }


def _share(ran: Sequence[tuple[Request, int, int]], name: str) -> float:
    of = sum(getattr(request, name) for request, _, _ in ran)
    return round(sum(tokens for *_, tokens in ran) / max(of, 1), 4)


def measured(backbone: HfEngine, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each agent, number of pictures and size of them, smallest first."""
    conversations = Conversations(backbone.processor)
    for tokens, n in itertools.product(options.tokens, options.pictures):
        for agent in (a for a in AGENTS if a.name in options.agents):
            started = time.perf_counter()
            session = Session(agent, n, tokens, options.turns, options.batch)
            asked = [*requests(backbone, conversations, session)]
            row = {
                "agent": agent.name,
                "pictures": n,
                "tokens a picture": tokens,
                "prompt tokens": sum(r.prompt for r in asked),
                "new": sum(r.new for r in asked),
                "prefix cache": sum(r.prefix for r in asked),
                "prefix cache, batched": sum(r.batched for r in asked),
                "prompt tokens, batched": sum(r.longer for r in asked),
                "ways": {name: told(asked, run(backbone, asked, way)) for name, way in WAYS.items()},
            }
            yield row | {"seconds": round(time.perf_counter() - started, 1)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people, as Markdown: tokens before the first token of all turns, and the most forwards of one."""
    head = ["agent", "N", "of", "new", "prefix cache", "batched", *WAYS, "exact / prefix cache"]
    head += ["default / exact", "anticipated / new", "amortize / new", "later work"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        ways = row["ways"]
        first = {name: way["before the first token"][1] for name, way in ways.items()}
        cells = [row["agent"], row["pictures"], row["tokens a picture"]]
        cells += [f"{row[k]:,}" for k in ("new", "prefix cache", "prefix cache, batched")]
        cells += [f"{first[n]:,} in {w['most forwards after the first turn']}" for n, w in ways.items()]
        cells += [ways["exact"]["of prefix cache after the first turn"]]
        cells += [round(first["default"] / first["exact"], 4)]
        cells += [ways[name]["of new after the first departure"] for name in ("anticipated", "amortize")]
        cells.append(" / ".join(f"{way['later'][1]:,}" for way in ways.values()))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    names = [agent.name for agent in AGENTS]
    parser = argparse.ArgumentParser(prog="python -m lab.price agents", description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--pictures", type=int, nargs="+", default=[1, 3, 5, 8], help="numbers that are kept")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1444], help="of a picture: squares")
    parser.add_argument("--agents", nargs="+", choices=names, default=names)
    parser.add_argument("--batch", type=int, default=8, help="of the client that evicts in batches")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write JSON there, after each row")
    options = parser.parse_args(arguments)
    if any(t < 16 or math.isqrt(t) ** 2 != t for t in options.tokens):
        parser.error("a picture is square: its tokens are a square number, 16 or more")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backbone = thin(options.layers, "thinking")
    given = {k: getattr(options, k) for k in ("turns", "pictures", "tokens", "batch", "layers")}
    document: dict[str, Any] = {"commit": commit(), "machine": machine(), **given, "rows": []}
    for row in measured(backbone, options):
        document["rows"].append(row)
        if options.output:
            keep(document, options.output)  # a run that is ended early leaves what it found
        print(f"{row['agent']} {row['pictures']} x {row['tokens a picture']}", file=sys.stderr)
    print(json.dumps(document, indent=1) if options.format == "json" else table(document["rows"]))
