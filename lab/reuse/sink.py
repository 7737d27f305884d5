"""The sink probe: the first tokens that a segment must stand behind to be stored as it is in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.engines.hf import HfEngine
from kamera.ops import KV, kv_slice, relocate_kv
from lab.reuse.forwards import answered, divergence, places, prefilled, texts

EDGE = 4
"""First tokens of a segment that are counted apart: a sink inside the segment would be there."""

NEAR = 0.1
"""A drift counts as settled within this share of the whole improvement, of the best."""


@dataclass(frozen=True)
class SinkPoint:
    """Segments computed behind the first ``tokens`` of a prompt alone, against behind all of it.

    ``edge`` and ``rest`` are the relative L2 differences of the KV of a segment's first `EDGE` tokens and of
    its others, ``kl`` that of the next token in nats; means over segments.
    """

    tokens: int
    edge: float
    rest: float
    kl: float


@dataclass(frozen=True)
class Sink:
    """The probe's points, and ``tokens``: the fewest first tokens with which the drift has settled.

    None: it falls with every further token of context, so no few first tokens stand out as a sink.
    ``local``: most of the drift without them lies in a segment's own first tokens (each segment grows a
    sink of its own), as multi-head attention shows.
    """

    points: tuple[SinkPoint, ...]
    tokens: int | None
    local: bool


def sink_of(
    backbone: HfEngine,
    *,
    ladder: Sequence[int] = (0, 1, 2, 4, 8, 16, 32),
    prompt: int = 128,
    segment: int = 32,
    segments: int = 16,
    text: str | None = None,
    seed: int = 0,
) -> Sink:
    """Probe a backbone; no attention weights are needed, so any attention kernel will do.

    `ValueError` for a ladder that does not begin with 0 or exceeds the prompt, and for a short ``text``.
    """
    if list(ladder) != sorted(set(ladder)) or ladder[0] != 0 or ladder[-1] > prompt or segment <= EDGE:
        raise ValueError(f"ladder {tuple(ladder)}: count up from 0 to at most the prompt's {prompt} tokens")
    asked = 4
    runs = texts(backbone, segments, prompt + segment + asked, text=text, seed=seed)
    rows: dict[int, list[tuple[float, float, float]]] = {k: [] for k in ladder}
    for ids in runs:
        before, body, question = ids.split([prompt, segment, asked])
        at_before, at_body, at_question = places(backbone, [prompt, segment, asked])
        context = prefilled(backbone, before, at_before)
        exact = prefilled(backbone, body, at_body, [context])
        truth = answered(backbone, question, at_question, [context, exact])
        for k in ladder:
            _, there = places(backbone, [k, segment])
            alone = prefilled(backbone, body, there, [kv_slice(context, 0, k)] if k else [])
            moved = relocate_kv(alone, backbone.layout, (prompt - k,) * backbone.axes)
            said = answered(backbone, question, at_question, [context, moved])
            rows[k].append(
                (
                    _off(kv_slice(moved, 0, EDGE), kv_slice(exact, 0, EDGE)),
                    _off(kv_slice(moved, EDGE, segment), kv_slice(exact, EDGE, segment)),
                    divergence(truth, said),
                )
            )
    means = {
        k: [sum(column) / len(found) for column in zip(*found, strict=True)] for k, found in rows.items()
    }
    points = tuple(SinkPoint(k, *means[k]) for k in ladder)
    return Sink(points, settled(points), points[0].edge > 2 * points[0].rest)


def settled(points: Sequence[SinkPoint]) -> int | None:
    """The fewest tokens from which on the drift stays near its least; None if only the last are enough."""
    drift = [point.edge + point.rest for point in points]
    limit = min(drift) + NEAR * (drift[0] - min(drift))
    count: int | None = None
    for point, value in zip(reversed(points[:-1]), reversed(drift[:-1]), strict=True):
        if value > limit:
            break
        count = point.tokens
    return count


def _off(one: KV, other: KV) -> float:
    """Relative L2 difference, the mean over channels of all layers."""
    errors = [
        float(
            torch.linalg.vector_norm((a[name] - b[name]).double())
            / torch.linalg.vector_norm(b[name].double())
        )
        for a, b in zip(one, other, strict=True)
        for name in b
    ]
    return sum(errors) / len(errors)
