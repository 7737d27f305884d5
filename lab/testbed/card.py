"""The measured part of MODEL_CARD.md: `python -m lab.testbed.card` writes it from the metrics files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .directories import weights_dir
from .families import FAMILIES

BEGIN, END = "<!-- measured: python -m lab.testbed.card -->", "<!-- end of measured -->"
_HEAD = (
    "| window | questions (2 / 3 hops) | family | full: 2 / 3 hops | one-hop | evicted: 2 / 3 hops "
    "| blind: 2 / 3 hops | blind one-hop |\n|---|---|---|---|---|---|---|---|"
)


def measured(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of all families: accuracy by window, and pictures against video."""
    lines = [_HEAD]
    for layout in next(iter(metrics.values()))["layouts"]:
        for i, (family, found) in enumerate(metrics.items()):
            scores = found["layouts"][layout]
            counts = scores["n"]
            first = (
                f"`{layout}` | {counts.get('2 hops', 0)} / {counts.get('3 hops', 0)}" if i == 0 else "  | "
            )
            full, evicted, blind = (scores[view] for view in ("full", "evicted", "blind"))
            lines.append(
                f"| {first} | {family} | {_hops(full)} | {_share(full, 'glyph')} "
                f"| {_hops(evicted)} | {_hops(blind)} | {_share(blind, 'glyph')} |"
            )
    seen = [
        f"{family} {video['accuracy_video']:.2f} / {video['accuracy_pictures']:.2f}"
        f" ({video['same_answer']:.0%} the same, n = {video['n']})"
        for family, found in metrics.items()
        if (video := found["video"]) is not None
    ]
    lines += [
        "",
        "Generated answers behind `LLRI`, pictures out of an mp4 (H.264, yuv444p, crf 12) / drawn, accuracy: "
        + f"{'; '.join(seen)}.",
    ]
    return "\n".join(lines)


def _hops(scores: Mapping[str, float]) -> str:
    return f"{_share(scores, '2 hops')} / {_share(scores, '3 hops')}"


def _share(scores: Mapping[str, float], kind: str) -> str:
    if kind not in scores:
        return "–"
    return f"{scores[kind]:.3f}".removeprefix("0")


def main() -> None:
    """Put the tables of the shipped metrics into the card, between its two marks."""
    folders = {family: weights_dir(family) for family in FAMILIES}
    metrics = {
        family: json.loads((folder / "metrics.json").read_text()) for family, folder in folders.items()
    }
    card = Path(__file__).with_name("MODEL_CARD.md")
    text = card.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    Path(card).write_text(f"{before}{BEGIN}\n{measured(metrics)}\n{END}{after}")


if __name__ == "__main__":
    main()
