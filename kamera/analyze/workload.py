"""What a workload repeats, by tokens: an exact prefix, what came before elsewhere, and what is new.

Nothing runs and nothing is served: these are upper bounds of what reuse saves (Irminsul, sections 3, 4, 7.4).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kamera.analyze.requests import Requests
from kamera.reuse import DEFAULT_RULE, RULES, ContentIndex, CutRule, Prompt

CARVED = 32
"""First tokens of a prompt that are run in any case: attention sinks (Irminsul, 7.1)."""

BLOCK = 64
"""Tokens of a block that is found only where it begins at a multiple of its length."""

Block = tuple[bytes, tuple[tuple[int, str], ...]]
"""Token ids, and the pictures among them, by where each begins."""


def recovery(
    requests: Requests, *, sink: int = CARVED, rule: CutRule = RULES[DEFAULT_RULE]
) -> dict[str, Any]:
    """Shares of each service's tokens, every request against all before it, of whatever service.

    ``prefix`` are at hand in a prefix cache, ``recovered`` came before at any place behind it (from token
    ``sink`` on), ``novel`` did not. ``blocks`` are those that hashing aligned blocks of 64 tokens would have
    recovered instead. Raises ValueError for a ``sink`` below 0.
    """
    if sink < 0:
        raise ValueError(f"sink {sink} must be 0 or more tokens")
    index, seen = ContentIndex(rule), set[Block]()
    counts: dict[str, Counter[str]] = {}
    for service, prompt in requests:
        found = index.find(prompt)
        index.add(prompt, found.cuts)
        first = max(found.prefix, sink)
        own = counts.setdefault(service, Counter())
        own.update(requests=1, tokens=len(prompt), prefix=found.prefix)
        own.update(recovered=_covered([(hit.start, hit.stop) for hit in found.hits], first))
        blocks = {at: _block(prompt, at) for at in range(0, len(prompt) - BLOCK + 1, BLOCK)}
        hits = [(at, at + BLOCK) for at, block in blocks.items() if block in seen]
        own.update(blocks=_covered(hits, first))
        seen.update(blocks.values())
    total: Counter[str] = sum(counts.values(), Counter())
    return {
        "sink": sink,
        "total": _shares(total),
        "services": [{"service": service, **_shares(own)} for service, own in counts.items()],
    }


def shift(requests: Requests, *, sink: int = CARVED, rule: CutRule = RULES[DEFAULT_RULE]) -> dict[str, Any]:
    """What reuse behind the prefix will gain on each service, told from its first requests (Irminsul, 7.4).

    ``first_variation`` is where a prompt first differs from all before it, ``unseen`` what came nowhere
    before; both are shares of tokens over the first half of the requests, without the very first. What is
    left of one is ``predicted``; ``measured`` is the share that the second half recovered. ``variants`` are
    the different segments that stood at the first variation, in all requests. Raises ValueError if no service
    has four requests.
    """
    by_service: dict[str, list[Prompt]] = {}
    for service, prompt in requests:
        by_service.setdefault(service, []).append(prompt)
    kept = {service: prompts for service, prompts in by_service.items() if len(prompts) > 3}
    if not kept:
        raise ValueError("no service of the trace has four requests: nothing can be told from a first half")
    rows = [{"service": name, **_shift(prompts, sink, rule)} for name, prompts in kept.items()]
    return {"sink": sink, "left_out": sorted(by_service.keys() - kept.keys()), "services": rows}


def _shift(prompts: Sequence[Prompt], sink: int, rule: CutRule) -> dict[str, Any]:
    index, variants = ContentIndex(rule), set[bytes]()
    rows: list[Counter[str]] = []
    for prompt in prompts:
        found = index.find(prompt)
        index.add(prompt, found.cuts)
        recovered = _covered([(hit.start, hit.stop) for hit in found.hits], max(found.prefix, sink))
        rows.append(Counter(tokens=len(prompt), prefix=found.prefix, recovered=recovered))
        if found.prefix < len(prompt):
            at = bisect_right(found.cuts, found.prefix)
            variants.add(prompt.slice(found.cuts[at - 1], found.cuts[at]))
    half = len(rows) // 2
    past: Counter[str] = sum(rows[1:half], Counter())
    rest: Counter[str] = sum(rows[half:], Counter())
    first = past["prefix"] / past["tokens"]
    unseen = 1.0 - first - past["recovered"] / past["tokens"]
    return {
        "requests": len(rows),
        "first_variation": first,
        "unseen": unseen,
        "variants": len(variants),
        "predicted": 1.0 - first - unseen,
        "measured": rest["recovered"] / rest["tokens"],
    }


def _block(prompt: Prompt, start: int) -> Block:
    shown = [(m.start - start, m.digest) for m in prompt.media if m.start < start + BLOCK and m.stop > start]
    return prompt.slice(start, start + BLOCK), tuple(shown)


def _covered(extents: Iterable[tuple[int, int]], first: int) -> int:
    """Tokens at ``first`` or later that are in any of ``extents``."""
    count, at = 0, first
    for start, stop in sorted(extents):
        count += max(0, stop - max(start, at))
        at = max(at, stop)
    return count


def _shares(counted: Mapping[str, int]) -> dict[str, Any]:
    tokens = counted["tokens"]
    shares = {name: counted[name] / tokens for name in ("prefix", "recovered", "blocks")}
    novel = (tokens - counted["prefix"] - counted["recovered"]) / tokens
    return {"requests": counted["requests"], "tokens": tokens, **shares, "novel": novel}
