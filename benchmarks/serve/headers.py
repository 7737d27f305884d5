"""What stands behind a header of its own, or behind a clock: does a prompt get it from prompts before it?

Five agents have one set of rules behind a name of their own; a conversation has the time in its system
prompt. Each goes through a pool and over HTTP to a process of ``kamera serve --reuse``; the next request
comes when the background is done. No request has a session's id, but for those of a clock that say so.
Counted from the third request on. *Moved* is the longest run of tokens, behind what a prefix cache holds,
that a prompt before it has; *supplied* are those that did not run there. With *other rules* each agent's are
shuffled: little has moved, and as little is supplied.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import httpx

from benchmarks import report
from benchmarks.price.counting import named, shared, watching
from benchmarks.serve.edits import First, Messages
from benchmarks.serve.peers import System, settled, started
from benchmarks.weights import load
from kamera import ChunkStore, ReusePolicy, SessionPool
from kamera.content import Conversations
from kamera.engines import engine_of
from kamera.engines.hf import HfEngine
from kamera.sessions.layout import default_policy

ANSWER, REQUESTS, FROM = 8, 5, 2
"""Tokens of an answer; requests of each traffic; the first one that is counted, from 0."""

MINIMA = ("exact", "default", "near", "blind")
RULES = [
    f"Rule {i}: {verb} the {thing} {place}, and tell {who} what you found there."
    for i, (verb, thing, place, who) in enumerate(
        (verb, thing, place, who)
        for who in ("the user", "nobody")
        for thing in ("report", "window", "ledger", "file")
        for verb, place in (("read", "at the desk"), ("open", "in the hall"), ("close", "by the door"))
    )
] + [f"Rule {24 + i}: a page of {i * 7 + 3} lines is never shown whole; quote it." for i in range(10)]


class Asked(NamedTuple):
    """What a request ran before its first token, its prompt, and the answer's text."""

    ran: int
    prompt: int
    text: str


def agents(shuffled: bool = False) -> list[Messages]:
    """A request of each agent."""
    draw, asked = random.Random(0), []
    for i in range(REQUESTS):
        rules = draw.sample(RULES, len(RULES)) if shuffled else RULES
        head = f"You are agent {draw.randrange(10**6)}, called {draw.choice('ABCDEFGH')}{i}. "
        system = {"role": "system", "content": head + " ".join(rules)}
        asked.append([system, {"role": "user", "content": f"What does rule {3 * i + 1} say?"}])
    return asked


def clock() -> list[Messages]:
    """Turns of a conversation whose system prompt has the time in it."""
    asked, history = list[Messages](), Messages()
    for i in range(REQUESTS):
        history = [*history, {"role": "user", "content": f"What does rule {3 * i + 1} say?"}]
        system = {"role": "system", "content": f"It is 12:0{i} now. {' '.join(RULES)}"}
        asked.append([system, *history])
        history = [*history, {"role": "assistant", "content": f"Rule {3 * i + 1} is clear."}]
    return asked


TRAFFIC = {
    "agents": agents,
    "agents, other rules": lambda: agents(shuffled=True),
    "a clock": clock,
    "a clock, with an id": clock,
}


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each traffic, least guarantee and way."""
    backbone = engine_of(load("smollm2"))
    assert isinstance(backbone, HfEngine), "it is loaded by transformers"
    conversations = Conversations(backbone.processor)
    for traffic, made in TRAFFIC.items():
        asked = made()
        tokens = [named(conversations.render(messages), -1) for messages in asked]
        plain = [_plain(backbone, conversations, messages) for messages in asked]
        for minimum in MINIMA:
            for way, answers in (("pool", _pool), ("serve --reuse", _served)):
                found, everything = answers(
                    backbone, asked, minimum, "one" if "id" in traffic.split() else None
                )
                yield {
                    "traffic": traffic,
                    "way": way,
                    "minimum": minimum,
                    **_counted(tokens, found),
                    "all that ran": everything,
                    "answers as plain": sum(a.text == b for a, b in zip(found, plain, strict=True)),
                }
                report.progress(f"{traffic}, {way}, {minimum}: {[a.ran for a in found]}")


def _counted(tokens: list[list[Hashable]], found: Sequence[Asked]) -> report.Row:
    if [len(one) for one in tokens] != [answer.prompt for answer in found]:
        raise AssertionError("a prompt is not what the template says")
    cached = [max((shared(one, own) for one in tokens[:i]), default=0) for i, own in enumerate(tokens)]
    theirs = [len(own) - held for own, held in zip(tokens, cached, strict=True)]
    moved = [
        max(_run(one, own[held:]) for one in tokens[:i])
        for i, (own, held) in enumerate(zip(tokens, cached, strict=True))
        if i >= FROM
    ]
    late = slice(FROM, None)
    prompts, ran, prefix = (
        sum(values[late]) for values in ([a.prompt for a in found], [a.ran for a in found], theirs)
    )
    return {
        "prompts": prompts,
        "prefix cache": prefix,
        "moved": sum(moved),
        "supplied": prefix - ran,
        "first, tokens": ran,
        "of the prompts": round(ran / prompts, 3),
        "of a prefix cache's": round(ran / prefix, 3),
        "requests dearer": sum(a.ran > own for a, own in zip(found, theirs, strict=True)),
    }


def _run(one: list[Hashable], other: list[Hashable]) -> int:
    """Tokens of the longest run that both have."""
    return SequenceMatcher(None, one, other, autojunk=False).find_longest_match().size


def _plain(backbone: HfEngine, conversations: Conversations, messages: Messages) -> str:
    processor, inputs = backbone.processor, conversations.whole(messages)
    assert processor is not None, "it came with the model"
    (ids,) = backbone.plain.generate(inputs, max_new_tokens=ANSWER, do_sample=False)
    return str(processor.decode(ids, skip_special_tokens=True)).strip()


def policy_of(minimum: str) -> ReusePolicy:
    """As ``kamera serve --reuse --minimum`` makes it; "default" is without ``--minimum``."""
    if minimum == "default":
        return default_policy("auto", reuse=True)
    loose = 1.0 if minimum in ("near", "blind") else None
    return ReusePolicy(minimum, max_divergence=loose)  # type: ignore[arg-type]  # one of its words


def _pool(
    backbone: HfEngine, asked: list[Messages], minimum: str, name: str | None
) -> tuple[list[Asked], int]:
    pool = SessionPool(backbone, ChunkStore.open("memory://"), policy=policy_of(minimum), reuse=True)
    found = []
    with watching(backbone) as everything:
        for messages in asked:
            with watching(backbone) as ran:
                first = First(ran)
                turn = pool.send(
                    messages, name, max_new_tokens=ANSWER, do_sample=False, logits_processor=[first]
                )
                pool.flush()
            found.append(Asked(first.tokens, turn.usage.prompt_tokens, turn.text.strip()))
        return found, everything.counts[1]


def _served(
    backbone: HfEngine, asked: list[Messages], minimum: str, name: str | None
) -> tuple[list[Asked], None]:
    """What ran is what its usage says."""
    chosen = () if minimum == "default" else ("--minimum", minimum)
    command = (sys.executable, "-m", "kamera", "serve", "smollm2", "--port", "PORT", "-q", "--reuse", *chosen)
    found = []
    with (
        started(System("kamera", command)) as (url, process),
        httpx.Client(verify=False, timeout=600) as http,
    ):
        for messages in asked:
            body: dict[str, Any] = {"model": "smollm2", "messages": messages, "temperature": 0}
            body |= {} if name is None else {"session_id": name}
            answer = http.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": ANSWER})
            answer.raise_for_status()
            told = answer.json()
            usage, text = told["usage"], told["choices"][0]["message"]["content"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            found.append(Asked(usage["prompt_tokens"] - cached, usage["prompt_tokens"], (text or "").strip()))
            settled(process)
    return found, None
