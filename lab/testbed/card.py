"""The measured part of MODEL_CARD.md: `python -m lab.testbed.card` writes it from the metrics files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .directories import UNLED_BACKBONES, weights_dir
from .families import FAMILIES

BEGIN, END = "<!-- measured: python -m lab.testbed.card -->", "<!-- end of measured -->"
BEGIN_UNLED, END_UNLED = "<!-- unled: python -m lab.testbed.card -->", "<!-- end of unled -->"
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


def measured_unled(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """For each unled backbone: two hops by window, and questions about the order of frames."""
    return "\n\n".join(f"**`{name}`**\n\n{_unled(found)}" for name, found in metrics.items())


def _unled(found: Mapping[str, Any]) -> str:
    lines = [
        "| window | two hops asked | full | evicted | blind evicted | blind | one-hop | defaults, evicted |",
        "|---" * 8 + "|",
    ]
    for layout, scores in found["layouts"].items():
        views = [_share(scores[view], "2 hops") for view in ("full", "evicted", "blind_evicted", "blind")]
        counted = scores["n"].get("2 hops", 0)
        shares = [*views, _share(scores["full"], "glyph"), _share(scores["evicted"], "default")]
        lines.append(f"| `{layout}` | {counted} | {' | '.join(shares)} |")
    lines.append("")
    for layout, kinds in found["order"].items():
        asked = [f"{kind} {_share(one, 'accuracy')} (n = {one['n']})" for kind, one in kinds.items()]
        lines.append(f"Questions about order behind `{layout}`: {', '.join(asked)}.")
    return "\n".join(lines)


def _hops(scores: Mapping[str, float]) -> str:
    return f"{_share(scores, '2 hops')} / {_share(scores, '3 hops')}"


def _share(scores: Mapping[str, float], kind: str) -> str:
    if kind not in scores:
        return "–"
    return f"{scores[kind]:.3f}".removeprefix("0")


def main() -> None:
    """Put the tables of the shipped metrics into the card, between its two marks."""
    card = Path(__file__).with_name("MODEL_CARD.md")
    text = _between(card.read_text(), BEGIN, measured(metrics_of(FAMILIES)), END)
    card.write_text(_between(text, BEGIN_UNLED, measured_unled(metrics_of(UNLED_BACKBONES)), END_UNLED))


def metrics_of(names: Iterable[str]) -> dict[str, Any]:
    """The measured figures that lie beside the weights, by backbone."""
    return {name: json.loads((weights_dir(name) / "metrics.json").read_text()) for name in names}


def _between(text: str, begin: str, new: str, end: str) -> str:
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{new}\n{end}{after}"


if __name__ == "__main__":
    main()
