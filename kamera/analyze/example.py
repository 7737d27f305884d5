"""Requests of agents made of Python's manual, so that every measurement runs without a trace of one's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any


def example(count: int = 8, seed: int = 0) -> Iterator[dict[str, Any]]:
    """``count`` requests of each kind, as `read_requests` reads them; ``service`` names the kind.

    The kinds are those of Irminsul's table 3, by what changes from one request to the next: a header before
    everything (``agent_meta``), a variable late in the system prompt (``sysvar``), turns that become a
    summary (``compact``), the order of passages (``rerank``), the selection of tools (``tool_variants``).
    """
    draw = random.Random(seed)
    pages = [text.strip() for text in topics.values() if 600 < len(text) < 6_000]
    rules, passages = pages[0], [page[:700] for page in pages[1:17]]
    tools = [f"Tool {name}: {text.strip()[:300]}" for name, text in itertools.islice(topics.items(), 12)]
    asks = [f"Explain {name} in two sentences." for name in itertools.islice(topics, count)]
    turns: list[dict[str, Any]] = []
    for number, ask in enumerate(asks):
        body = "\n\n".join((rules, *passages[:6]))
        header = f"agent {draw.randrange(10**6)}, run {draw.randrange(10**9)}, step {number}\n\n"
        yield _request("agent_meta", header + body, ask)
        yield _request("sysvar", f"{body}\n\nToday is day {number}.\n\n{passages[6]}", ask)
        if number % 4 == 3:
            turns = [{"role": "user", "content": f"Summary so far: {ask}"}, *turns[-3:]]
        turns = [*turns, {"role": "user", "content": ask}]
        yield _request("compact", rules, turns=turns)
        turns = [*turns, {"role": "assistant", "content": passages[number % len(passages)]}]
        shuffled = draw.sample(passages, 8)
        yield _request("rerank", rules, "\n\n".join((*shuffled, ask)))
        yield _request("tool_variants", "\n\n".join((rules, *draw.sample(tools, 8))), ask)


def _request(service: str, system: str, ask: str = "", turns: list[dict[str, Any]] | None = None) -> Any:
    said = [{"role": "user", "content": ask}] if turns is None else turns
    return {"service": service, "messages": [{"role": "system", "content": system}, *said]}
