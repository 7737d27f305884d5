"""What each way of serving a screen loses: four screens, the last served from KV of another origin."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from benchmarks.fidelity import arms
from benchmarks.fidelity.reader import Reader, Sabotage
from benchmarks.report import Row
from benchmarks.screen_reader.questions import SYSTEM, candidates, first_token, question
from benchmarks.screen_reader.screens import Items, Painter
from kamera import Backbone


def measure(backbone: Backbone, items: Items, seed: int, sabotage: Sabotage, asked: int = 4) -> list[Row]:
    """Rows of every arm and question: ``asked`` on the last screen ("within"), as many on those before."""
    reader, draw, painter = Reader(backbone, sabotage, SYSTEM), random.Random(seed), Painter(items, seed)
    screens = [painter.screen(most=6) for _ in range(5)]
    gone, *rest = (backbone.chunk(screen.picture) for screen in screens)
    passages = arms.Passages(gone, tuple(rest[:3]), rest[3])
    asks = [("within", draw.choice(screens[4].shown)) for _ in range(asked)]
    asks += [("across", draw.choice(draw.choice(screens[1:4]).shown)) for _ in range(asked)]
    texts = [reader.tokenize(question(kind, word)) for _, (kind, word, _) in asks]
    choices = [candidates(kind, answer, items.words, draw) for _, (kind, _, answer) in asks]
    among = [torch.cat([reader.tokenize(text)[:1] for text in texts]) for texts in choices]
    right = [int(reader.tokenize(first_token(kind, answer))[0]) for _, (kind, _, answer) in asks]
    rows: list[Row] = []
    true: list[torch.Tensor] = []
    for arm in arms.arms(reader, passages):
        said = [reader.logits([text], arm.sources)[0][-1].float().log_softmax(-1) for text in texts]
        true = true or said
        for (where, (kind, *_)), ours, whole, some, answer in zip(
            asks, said, true, among, right, strict=True
        ):
            rows.append(
                {"arm": arm.name, "asked": where, "kind": kind, "size": round(arm.size, 4)}
                | {"kl": max(0.0, float((whole.exp() * (whole - ours)).sum()))}
                | {"agrees": bool(ours.argmax() == whole.argmax())}
                | {"right": int(some[ours[some].argmax()]) == answer}
            )
    return rows


def table(rows: Sequence[Row]) -> Iterator[Row]:
    """One line an arm: KL to the re-prefill, η, agreement and right answers, by where asked."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["arm"], []).append(row)
    for name, every in found.items():
        line: dict[str, object] = {"arm": name, "size": sum(row["size"] for row in every) / len(every)}
        for where in ("within", "across"):
            some = [row for row in every if row["asked"] == where]
            against = "blind" if "all" not in name else "blind, all"
            blind = sum(row["kl"] for row in found[against] if row["asked"] == where)
            lost = sum(row["kl"] for row in some)
            line |= {
                f"n {where}": len(some),
                f"KL {where}": lost / len(some),
                f"η {where}": 1 - lost / blind,
                f"top-1 {where}": sum(row["agrees"] for row in some) / len(some),
                f"right {where}": sum(row["right"] for row in some) / len(some),
            }
        yield line
