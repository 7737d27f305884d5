"""Conversations of many clients over a real server: requests per second, times, and answers that differ."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx

from benchmarks import report
from benchmarks.serve.listening import serving
from kamera import ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.serve import Service

SYSTEM = {"role": "system", "content": testbed.SYSTEM}
TURNS, TOKENS = 3, 12


class Reply(NamedTuple):
    """An answer's text, and seconds to its first token and to its end."""

    text: str
    first: float
    whole: float


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each number of clients, and one for the most of them served one at a time."""
    backbone = HfEngine(*testbed.load())
    backbone.model.generation_config.eos_token_id = None  # all answers are of one length
    talks = max(1, options.requests // TURNS)
    alone = _run(backbone, 1, talks, options.at_once)[1]
    arms = {str(n): (n, options.at_once) for n in options.clients}
    arms[f"{max(options.clients)}, one at a time"] = (max(options.clients), 1)
    runs: dict[str, list[tuple[float, list[Reply]]]] = {name: [] for name in arms}
    for _ in range(options.rounds):
        for name, (clients, at_once) in arms.items():
            runs[name].append(_run(backbone, clients, talks, at_once))
            report.progress(f"{name} clients")
    for name, found in runs.items():
        replies = [reply for _, some in found for reply in some]
        first, whole = ([getattr(r, kind) for r in replies] for kind in ("first", "whole"))
        rates = [len(some) / seconds for seconds, some in found]
        yield {
            "clients": name,
            "requests": len(replies),
            "requests per second": round(statistics.median(rates), 2),
            "first token, median": round(statistics.median(first), 3),
            "first token, p99": round(_p99(first), 3),
            "answer, median": round(statistics.median(whole), 3),
            "answer, p99": round(_p99(whole), 3),
            "other answers": sum(
                a.text != b.text for _, some in found for a, b in zip(alone, some, strict=True)
            ),
        }


def _run(backbone: HfEngine, clients: int, talks: int, at_once: int) -> tuple[float, list[Reply]]:
    """Seconds, and the replies of all conversations in order."""
    with serving(Service(backbone, ReusePolicy.exact()), at_once=at_once) as url:
        started = time.perf_counter()
        found = asyncio.run(_loaded(f"{url}/v1/chat/completions", clients, talks))
        return time.perf_counter() - started, [reply for _, some in sorted(found.items()) for reply in some]


async def _loaded(url: str, clients: int, talks: int) -> dict[int, list[Reply]]:
    waiting, found = iter(range(talks)), dict[int, list[Reply]]()

    async def client() -> None:
        async with httpx.AsyncClient(timeout=600, verify=False) as http:
            for number in waiting:
                found[number] = await _talk(http, url, number)

    await asyncio.gather(*[client() for _ in range(clients)])
    return found


async def _talk(client: httpx.AsyncClient, url: str, number: int) -> list[Reply]:
    history: list[Any] = [SYSTEM, {"role": "user", "content": f"camera {number}: value of tag {number % 8}?"}]
    found = []
    for turn in range(TURNS):
        found.append(await _replied(client, url, history))
        history.append({"role": "assistant", "content": found[-1].text})
        history.append({"role": "user", "content": f"and of tag {turn + number % 5}?"})
    return found


async def _replied(client: httpx.AsyncClient, url: str, messages: list[Any]) -> Reply:
    """A streamed answer. Raises httpx.HTTPStatusError."""
    body = {"model": "served", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": True}
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


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
