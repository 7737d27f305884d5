"""The partition-shift diagnostic: how much reuse beyond the prefix a workload can gain, from two counts.

A request differs from the earlier ones at a *first variation*; of what comes after it, the *variation set*
(segments never seen) is lost to any cache, and the rest is what content-addressed reuse recovers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kamera.reuse.cuts import cut_prompt
from kamera.reuse.index import ContentIndex
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import CutRule
from lab.reuse.recovery import SINK, Observer


@dataclass(frozen=True)
class Shift:
    """Counts of a workload; shares are of prompt tokens, and the first request is left out.

    ``first_variation``: the mean place of the first token that differs from every earlier prompt, a share.
    ``variation_set``: unseen segments per request, of ``segment`` tokens each. ``predicted`` is the gain that
    these means of the first half of the requests give, ``measured`` the recovered share of the second half.
    """

    requests: int
    first_variation: float
    variation_set: float
    segment: float
    predicted: float
    measured: float


def shift(prompts: Sequence[Prompt], rule: CutRule, *, sink: int = SINK) -> Shift:
    """The diagnostic of requests in their order. `ValueError` for fewer than three."""
    if len(prompts) < 3:
        raise ValueError(f"{len(prompts)} requests: the diagnostic needs three or more")
    index = ContentIndex(rule)
    observer = Observer(index, sink=sink)
    seen: set[tuple[bytes, str]] = set()
    rows = []
    for prompt in prompts:
        media = {m.start: m.digest for m in prompt.media}
        borders = cut_prompt(prompt, rule)
        pieces = [(a, b, (prompt.slice(a, b), media.get(a, ""))) for a, b in itertools.pairwise(borders)]
        counted = observer.observe(prompt)
        new = [b - a for a, b, content in pieces if content not in seen]
        seen.update(content for *_, content in pieces)
        rows.append((len(prompt), counted.prefix, counted.recovered, len(new), sum(new)))
    half = max(2, len(rows) // 2)
    past, future = rows[1:half], rows[half:]
    tokens = sum(row[0] for row in past)
    first, fresh = sum(row[1] for row in past) / tokens, sum(row[3] for row in past) / len(past)
    unseen = sum(row[4] for row in past)
    total = sum(row[0] for row in future)
    return Shift(
        requests=len(prompts),
        first_variation=first,
        variation_set=fresh,
        segment=unseen / max(1, sum(row[3] for row in past)),
        predicted=max(0.0, 1.0 - first - unseen / tokens),
        measured=sum(row[2] for row in future) / max(1, total),
    )
