"""A server on loopback under several clients at once: requests per second, first tokens, and wrong answers.

    python -m lab.serve_load [--clients 1 4 16] [--requests 48] [--turns 3] [--tokens 12] [--at-once 16]
                             [--rounds 2] [--output FILE]

The shipped backbone, greedy, exact. Each client talks: it sends its whole history, streams the answer, and
asks on. Each number of clients sends the same conversations, as many requests in all, to a server of its own;
the last arm is the most clients before a server that answers one request at a time. Arms take turns. A first
run with one client is not timed: its answers are what all others must be. Processor seconds are of the server
and its clients, which share a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from kamera import ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.serve import Front, Keys, Service
from lab.results import keep
from lab.serving import listening
from lab.speed.machine import commit, machine

SYSTEM = {"role": "system", "content": testbed.SYSTEM}


class Reply(NamedTuple):
    """An answer's text, and seconds to its first token and to its end."""

    text: str
    first: float
    whole: float


class Run(NamedTuple):
    """Seconds, processor seconds and answers of all conversations."""

    seconds: float
    spent: float
    replies: list[Reply]


@contextmanager
def serving(backbone: HfEngine, at_once: int) -> Iterator[str]:
    """The address of a server that has answered nothing yet."""
    front = Front(Service(backbone, ReusePolicy.exact()), Keys(None), ["testbed"], at_once=at_once)
    with listening(front) as address:
        yield f"{address}/v1/chat/completions"


async def replied(client: httpx.AsyncClient, url: str, messages: list[Any], tokens: int) -> Reply:
    """A streamed answer. Raises httpx.HTTPStatusError."""
    body = {"model": "testbed", "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    started, first, text = time.perf_counter(), 0.0, ""
    async with client.stream("POST", url, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() - started if piece else 0.0)
                text += piece
    whole = time.perf_counter() - started
    return Reply(text, first or whole, whole)


async def talk(client: httpx.AsyncClient, url: str, number: int, turns: int, tokens: int) -> list[Reply]:
    """One conversation."""
    history: list[Any] = [SYSTEM, {"role": "user", "content": f"camera {number}: value of tag {number % 8}?"}]
    found = []
    for turn in range(turns):
        found.append(await replied(client, url, history, tokens))
        history.append({"role": "assistant", "content": found[-1].text})
        history.append({"role": "user", "content": f"and of tag {turn + number % 5}?"})
    return found


async def loaded(url: str, clients: int, talks: int, turns: int, tokens: int) -> dict[int, list[Reply]]:
    """All conversations, at most ``clients`` of them at once."""
    waiting, found = iter(range(talks)), dict[int, list[Reply]]()

    async def client() -> None:
        async with httpx.AsyncClient(timeout=600, verify=False) as http:
            for number in waiting:
                found[number] = await talk(http, url, number, turns, tokens)

    await asyncio.gather(*[client() for _ in range(clients)])
    return found


def measured(
    backbone: HfEngine, clients: Sequence[int], talks: int, turns: int, tokens: int, at_once: int, rounds: int
) -> dict[str, Any]:
    """Of each number of clients: requests per second, seconds to first tokens and ends, other answers."""
    with serving(backbone, at_once) as url:
        alone = asyncio.run(loaded(url, 1, talks, turns, tokens))
    arms = {str(n): (n, at_once) for n in clients} | {f"{max(clients)}, one at a time": (max(clients), 1)}
    names, runs, other = [*arms], dict[str, list[Run]](), dict.fromkeys(arms, 0)
    for i in range(rounds):
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            with serving(backbone, arms[name][1]) as url:
                started, own = time.perf_counter(), time.process_time()
                found = asyncio.run(loaded(url, arms[name][0], talks, turns, tokens))
                seconds, spent = time.perf_counter() - started, time.process_time() - own
            pairs = [pair for k in alone for pair in zip(alone[k], found[k], strict=True)]
            other[name] += sum(a.text != b.text for a, b in pairs)
            runs.setdefault(name, []).append(Run(seconds, spent, [reply for _, reply in pairs]))
    return {name: {**_told(runs[name]), "other answers": other[name]} for name in names}


def _told(runs: Sequence[Run]) -> dict[str, Any]:
    replies = [reply for run in runs for reply in run.replies]
    first, whole = ([getattr(r, name) for r in replies] for name in ("first", "whole"))
    return {
        "requests": len(replies),
        "requests per second": [round(len(run.replies) / run.seconds, 2) for run in runs],
        "processor seconds a request": round(sum(run.spent for run in runs) / len(replies), 4),
        "first token, median": round(statistics.median(first), 3),
        "first token, p99": round(_p99(first), 3),
        "answer, median": round(statistics.median(whole), 3),
        "answer, p99": round(_p99(whole), 3),
    }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    names = [
        "processor seconds a request",
        "first token, median",
        "first token, p99",
        "answer, median",
        "answer, p99",
        "other answers",
    ]
    lines = [f"`{document['command']}`, commit {document['commit']}", ""]
    lines += ["| clients | requests per second | " + " | ".join(names) + " |", "|---" * 8 + "|"]
    for clients, told in document["clients"].items():
        cells = [
            f"{statistics.median(told['requests per second']):.2f}",
            *(str(told[name]) for name in names),
        ]
        lines.append(f"| {clients} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.serve_load")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    if asked.requests % asked.turns:
        parser.error("requests are whole conversations: give a multiple of turns")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backbone = HfEngine(*testbed.load())
    backbone.model.generation_config.eos_token_id = None  # all answers are of one length
    talks = asked.requests // asked.turns
    limits = (asked.turns, asked.tokens, asked.at_once, asked.rounds)
    with redirect_stdout(sys.stderr):  # servers say where they are
        found = measured(backbone, asked.clients, talks, *limits)
    document = {
        "command": f"python -m lab.serve_load --clients {' '.join(map(str, asked.clients))} --requests "
        f"{asked.requests} --turns {asked.turns} --tokens {asked.tokens} --at-once {asked.at_once} "
        f"--rounds {asked.rounds}",
        "commit": commit(),
        "machine": machine(),
        "clients": found,
    }
    if asked.output is not None:
        keep(document, asked.output)
    print(table(document), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
