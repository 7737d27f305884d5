"""The measured part of docs/sabotage.md: `python -m lab.sabotage.page` writes it from the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.sabotage.document import blindness, cells, headings

TOP = Path(__file__).resolve().parents[2]
RESULTS, PAGE = TOP / "docs" / "results" / "sabotage", TOP / "docs" / "sabotage.md"
BEGIN, END = "<!-- measured: python -m lab.sabotage.page -->", "<!-- end of measured -->"


def beds(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """Every measured bed with the items asked for, by backbone, worlds in the order of their regimes."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    worlds = ("override", "redundant", "static")
    every = [{**bed, "items": one["items"]} for one in found for bed in one["beds"]]
    return sorted(every, key=lambda bed: (bed["backbone"], worlds.index(bed["world"])))


def measured(every: Sequence[Mapping[str, Any]]) -> str:
    """Which bed sees which arm, then each bed's table."""
    parts = ["\n".join(_summary(every))]
    for bed in every:
        lines = [
            f"### {bed['backbone']}, {bed['world']}",
            "",
            _line(["arm", *headings(bed)]),
            "|---" * (len(headings(bed)) + 1) + "|",
            *(_line(row) for row in cells(bed)),
            "",
            f"*{blindness(bed).capitalize()}.*",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _summary(every: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    arms = dict.fromkeys(arm for bed in every for arm in bed["seen"])
    yield _line(["arm", *(f"{bed['backbone']}, {bed['world']}" for bed in every)])
    yield "|---" * (len(every) + 1) + "|"
    for arm in arms:
        yield _line([arm, *(_seen(bed, arm) for bed in every)])


def _seen(bed: Mapping[str, Any], arm: str) -> str:
    """The setups that see an arm in decisions; else those that do in likelihood; else a dash."""
    if arm not in bed["seen"]:
        return "none such"
    for level in ("decisions", "likelihood"):
        setups = [setup for setup, seen in bed["seen"][arm].items() if seen == level]
        if setups:
            return ", ".join(setups) if level == "decisions" else f"~ {', '.join(setups)}"
    return "**passes**"


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def main() -> None:
    """Put the tables into the page, between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{measured(beds())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
