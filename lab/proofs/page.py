"""The tables of docs/proofs.md, out of docs/results/proofs: ``python -m lab.proofs.page``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "proofs"
SHOWN = (
    *((name, "float32") for name in ("gqa", "mla", "gqa-unled", "mla-unled")),
    ("gqa", "bfloat16"),
)
"""Columns: a family of backbones and the dtype it was run in."""


COUNTED = ("windows", "answered", "proved", "narrow, answered", "narrow")
"""Columns of `narrow`: windows, and those that were proved by answers alone and with the KV."""


def page(results: Path = RESULTS) -> str:
    """An arm a line: windows that proved themselves, the proof's KL and KV, and what real questions lose."""
    beds = [(name, dtype, _arms(results, name, dtype)) for name, dtype in SHOWN]
    head = " | ".join(f"{name}, {'fp32' if dtype == 'float32' else 'bf16'}" for name, dtype, _ in beds)
    lines = [f"| served | {head} |", "|---" * (len(beds) + 1) + "|"]
    for arm in dict.fromkeys(arm for _, _, arms in beds for arm in arms):
        cells = [_cell(arms[arm]) if arm in arms else "none such" for _, _, arms in beds]
        name = arm.replace("SABOTAGE ", "wrong: ").replace("formed", "**formed**")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _arms(results: Path, family: str, dtype: str) -> dict[str, Any]:
    document = json.loads((results / f"{family}-{dtype}.json").read_text(encoding="utf-8"))
    arms: dict[str, Any] = document["families"][family]["arms"]
    return arms


def _cell(arm: dict[str, Any]) -> str:
    proved = f"{arm['proved']}/{arm['windows']}"
    bold = f"**{proved}**" if arm["proved"] else proved
    return f"{bold}, {arm['proof kl']:.2g}, {arm['kv']:.2g} · {arm['kl']:.2g}, {arm['right']:.2f}"


def narrow(results: Path = RESULTS) -> str:
    """A kind of arm a line, over all runs: windows proved by answers alone, and with the KV."""
    arms = [
        (name, arm)
        for path in sorted(results.glob("*.json"))
        for bed in json.loads(path.read_text(encoding="utf-8"))["families"].values()
        for name, arm in bed["arms"].items()
    ]
    few = "four of one kind: answers alone"
    lines = [
        f"| served | windows | six questions: answers alone | with KV | {few} | with KV | error of KV |",
        "|---" * 7 + "|",
    ]
    for kind in dict.fromkeys(map(_kind, dict(arms))):
        of = [arm for name, arm in arms if _kind(name) == kind]
        counts = (sum(arm[key] for arm in of) for key in COUNTED)
        span = f"{min(arm['kv, least'] for arm in of):.2g} – {max(arm['kv, largest'] for arm in of):.2g}"
        lines.append(f"| {' | '.join([kind, *map(str, counts), span])} |")
    return "\n".join(lines)


def _kind(arm: str) -> str:
    if not arm.startswith("SABOTAGE"):
        return arm
    hidden = "axis w not rotated"
    return f"wrong: {hidden}" if arm.endswith(hidden) else "wrong, any other"


if __name__ == "__main__":
    print(page(), narrow(), sep="\n\n")
