"""MM-NIAH's scorer: choices, soft accuracy of lists, words in text; and scores by length and depth.

Follows the benchmark's ``calculate_scores`` with its quirks (the rule for letters, zero for empty rows of the
depth axis), so that numbers are comparable.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kamera.eval.tasks.vqa_text import holds_word, normalize

LENGTHS = (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 40000, 48000, 64000)
"""Lower edges, in tokens, of the context lengths that are scored; shorter contexts are discarded."""
LABELS = tuple(f"{edge // 1000}k" for edge in LENGTHS)
DEPTHS = 5


class HeatBin(NamedTuple):
    """Column and row of a sample in the heat map; column -1 is below the first edge."""

    column: int
    row: int


def score_response(response: str, answer: Any) -> float:
    """0.0 to 1.0 by the type of ``answer``: index of a choice, list of counts, or words."""
    stripped = response.strip(".")
    if isinstance(answer, int):
        return float(_choice(stripped) == answer)
    if isinstance(answer, list):
        return _soft_accuracy(stripped, answer)
    return float(holds_word(normalize(stripped), normalize(str(answer))))


def decide(response: str, kind: type) -> str:
    """The reading that `score_response` compares with an answer of ``kind`` (int, list or str), as text."""
    stripped = response.strip(".")
    if kind is int:
        chosen = _choice(stripped)
        return f"choice {chosen}" if chosen is not None else f"unread: {normalize(stripped)}"
    if kind is list:
        counts = _counts(stripped)
        return json.dumps(counts) if counts is not None else f"unread: {normalize(stripped)}"
    return normalize(stripped)


def place(context_length: float, placed_depth: float | Sequence[float]) -> HeatBin:
    """Cell of a sample; ``placed_depth`` (0 to 1) of several needles is their mean."""
    depths = [placed_depth] if isinstance(placed_depth, int | float) else list(placed_depth)
    depth = sum(depths) / len(depths)
    row = int((0.99 if depth == 1.0 else depth) / 0.2)
    return HeatBin(int(np.digitize(context_length, LENGTHS)) - 1, row)


def bin_scores(scored: Iterable[tuple[HeatBin, float]]) -> list[float]:
    """One subtask's eleven scores: the mean over five depths of cell means, an empty cell being 0."""
    cells: dict[HeatBin, list[float]] = defaultdict(list)
    for where, score in scored:
        cells[where].append(score)
    means = {where: sum(scores) / len(scores) for where, scores in cells.items()}
    return [
        round(sum(means.get(HeatBin(column, row), 0.0) for row in range(DEPTHS)) / DEPTHS, 6)
        for column in range(len(LENGTHS))
    ]


def _choice(text: str) -> int | None:
    if text.isdigit():
        return int(text) if text.isdecimal() else None
    text = text.lower().replace("the answer is", "").replace("*", "")
    if "." in text:
        text = text.split(".")[0].replace(",", "")
    text = text.strip()
    if "the camera is moving left" in text:
        text = "a"
    elif "the camera is moving right" in text:
        text = "b"
    return ord(text) - ord("a") if len(text) == 1 else None


def _counts(text: str) -> list[Any] | None:
    try:
        given = json.loads(text.replace("json", "").replace("```", "").strip())
    except (ValueError, RecursionError):
        return None
    if isinstance(given, dict):
        if not all(isinstance(value, list) for value in given.values()):
            return None
        given = [item for value in given.values() for item in value]
    return given if isinstance(given, list) else None


def _soft_accuracy(text: str, answer: list[Any]) -> float:
    """The share of positions that agree; items beyond the answer's length do not count."""
    given = _counts(text)
    if given is None or not answer:
        return 0.0
    return sum(a == b for a, b in zip(given, answer, strict=False)) / len(answer)
