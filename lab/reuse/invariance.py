"""The τ-free ROC of position invariance: which channels of a model's KV mean the same at every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.engines.hf import HfEngine
from kamera.ops import KV, kv_slice, relocate_kv
from lab.reuse.forwards import places, prefilled, texts


@dataclass(frozen=True)
class Invariance:
    """One channel of one layer, its area under the ROC curve over all thresholds of cosine.

    1.0: equal content at two positions is always more alike than unequal content; 0.5: chance; below 0.5
    naive reuse misleads. ``as_stored`` compares KV as cached, ``moved`` KV rotated to one position; they are
    equal for a channel without rotation.
    """

    layer: int
    channel: str
    phased: bool
    as_stored: float
    moved: float


def invariance(
    backbone: HfEngine,
    *,
    blocks: int = 64,
    tokens: int = 16,
    positions: Sequence[int] = (0, 32, 64, 128, 224),
    text: str | None = None,
    seed: int = 0,
) -> list[Invariance]:
    """Measure every channel: the KV of the last token of ``blocks`` blocks, each at all ``positions``.

    Blocks stand behind one filler text. Positives are pairs of one block at two positions, negatives are
    as many pairs of two blocks at random positions (Irminsul, section 5). `ValueError` for fewer than two
    blocks or positions, and for ``text`` that is too short.
    """
    if blocks < 2 or len(set(positions)) < 2 or tokens < 1 or min(positions) < 0:
        raise ValueError(f"blocks={blocks}, positions={tuple(positions)}: compare two of each or more")
    last = max(positions)
    filler, *_ = texts(backbone, 1, max(last, 1), text=text, seed=seed + 1)
    contents = texts(backbone, blocks, tokens, text=text, seed=seed)
    start, _ = places(backbone, [len(filler), tokens])
    behind = prefilled(backbone, filler, start)
    held: list[list[KV]] = []  # by block and position, its last token
    level: list[Sequence[KV]] = []
    for ids in contents:
        rows: list[KV] = []
        for at in positions:
            _, there = places(backbone, [at, tokens])
            kv = prefilled(backbone, ids, there, [kv_slice(behind, 0, at)] if at else [])
            rows.append(kv_slice(kv, tokens - 1, tokens))
        held.append(rows)
        level.append(
            [
                relocate_kv(kv, backbone.layout, (last - at,) * backbone.axes)
                for kv, at in zip(rows, positions, strict=True)
            ]
        )
    pairs = _pairs(blocks, len(positions), seed)
    out = []
    for i, spec in enumerate(backbone.layout):
        for c in spec.channels:
            scores = [
                auc(
                    *(
                        [_cosine(kv[a][p][i][c.name], kv[b][q][i][c.name]) for a, p, b, q in kind]
                        for kind in pairs
                    )
                )
                for kv in (held, level)
            ]
            out.append(Invariance(i, c.name, c.rope is not None, *scores))
    return out


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """The share of pairs in which a positive exceeds a negative; ties count half."""
    scores = torch.tensor([*positives, *negatives], dtype=torch.float64)
    order = scores.argsort()
    ranks = torch.empty_like(scores)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    for value in scores.unique():  # ties share their mean rank
        same = scores == value
        ranks[same] = ranks[same].mean()
    n, m = len(positives), len(negatives)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


Pair = tuple[int, int, int, int]
"""Block and position of one vector, block and position of the other."""


def _pairs(blocks: int, places: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    equal = [(b, p, b, q) for b in range(blocks) for p in range(places) for q in range(p)]
    other = [(a, draw(places), (a + 1 + draw(blocks - 1)) % blocks, draw(places)) for a, *_ in equal]
    return equal, other


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))
