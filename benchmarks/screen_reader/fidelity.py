"""What each way of serving a screen loses: the last of four, or of three, from KV of another origin."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from benchmarks.fidelity import arms
from benchmarks.fidelity.reader import Reader, Sabotage
from benchmarks.report import Row
from benchmarks.screen_reader.questions import ASKED, SYSTEM, candidates, questions
from benchmarks.screen_reader.screens import Items, Painter
from kamera import Backbone

SHOWN = (
    "re-prefill",
    "blind",
    "patch, rank 16",
    "patch, rank 32",
    "near, rank 32",
    "orbit, rank 32",
    "survivor",
)
"""Arms that are asked."""


def measure(
    backbone: Backbone, items: Items, seed: int, sabotage: Sabotage, which: bool = False, most: int = 10
) -> list[Row]:
    """Rows of every arm and question: ``most`` on the last screen ("within"), as many on those before.

    ``which``: of three screens, on which something was, and nothing else (of four it is never taught).
    """
    kinds, count = (["screen"], 3) if which else ([kind for kind in ASKED if kind != "screen"], 4)
    reader, draw, painter = Reader(backbone, sabotage, SYSTEM), random.Random(seed), Painter(items, seed)
    screens = [painter.screen(most=8) for _ in range(count + 1)]
    gone, *rest = (backbone.chunk(screen.picture) for screen in screens)
    passages = arms.Passages(gone, tuple(rest[:-1]), rest[-1])
    every = questions(screens[1:], draw, kinds)
    asks = [("within", question) for question in every if question.place == count - 1][:most]
    asks += [("across", question) for question in every if question.place < count - 1][:most]
    texts = [reader.question(question.text) for _, question in asks]
    among = [
        torch.cat([reader.tokenize(text)[:1] for text in candidates(question, items, draw)])
        for _, question in asks
    ]
    rows: list[Row] = []
    true: list[torch.Tensor] = []
    for arm in arms.arms(reader, passages):
        if arm.name not in SHOWN:
            continue
        said = [logits[-1].float().log_softmax(-1) for logits in reader.logits(texts, arm.sources)]
        true = true or said
        for (where, question), ours, whole, some in zip(asks, said, true, among, strict=True):
            rows.append(
                {"arm": arm.name, "asked": where, "kind": question.kind, "size": round(arm.size, 4)}
                | {"kl": max(0.0, float((whole.exp() * (whole - ours)).sum()))}
                | {"agrees": bool(ours.argmax() == whole.argmax())}
                | {"right": int(ours.argmax()) == int(some[0]), "chosen": int(ours[some].argmax()) == 0}
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
            blind = sum(row["kl"] for row in found["blind"] if row["asked"] == where)
            lost = sum(row["kl"] for row in some)
            line |= {
                f"n {where}": len(some),
                f"KL {where}": lost / len(some),
                f"η {where}": 1 - lost / blind,
                f"top-1 {where}": sum(row["agrees"] for row in some) / len(some),
                f"right {where}": sum(row["right"] for row in some) / len(some),
            }
        yield line
