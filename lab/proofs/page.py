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


def page(results: Path = RESULTS) -> str:
    """An arm a line: windows that proved themselves, the proof's KL, and what real questions lose."""
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
    return f"{bold}, {arm['proof kl']:.2g} · {arm['kl']:.2g}, {arm['right']:.2f}"


if __name__ == "__main__":
    print(page())
