"""The measured parts of docs/sabotage.md: `python -m lab.sabotage.page` writes them from the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.trust import GUARANTEES
from lab.sabotage.certificates import seen_by
from lab.sabotage.document import blindness, cells, headings

TOP = Path(__file__).resolve().parents[2]
RESULTS, PAGE = TOP / "docs" / "results" / "sabotage", TOP / "docs" / "sabotage.md"
BUILDS = TOP / "docs" / "results" / "certify" / "builds"
BEGIN, END = "<!-- measured: python -m lab.sabotage.page -->", "<!-- end of measured -->"
BUILDS_BEGIN, BUILDS_END = "<!-- builds: python -m lab.sabotage.page -->", "<!-- end of builds -->"


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


def certified(folder: Path = BUILDS) -> list[Mapping[str, Any]]:
    """Every table of wrong builds and the certificates they get."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def built(every: Sequence[Mapping[str, Any]]) -> str:
    """A row for each build: its verdicts on every backbone, and by what it is found out."""
    lines = [
        _line(["what is wrong", *(f"{one['backbone']}, {one['dtype']}" for one in every)]),
        "|---" * (len(every) + 1) + "|",
    ]
    for name in dict.fromkeys(name for one in every for name in one["builds"]):
        lines.append(_line([name, *(_verdicts(one["builds"].get(name)) for one in every)]))
    safe = sum(len(one["safe_of_wrong_builds"]) for one in every)
    wrong = sum(len(one["builds"]) - 1 for one in every)
    return "\n".join([*lines, "", f"*Safe among {wrong} certificates of wrong builds: {safe}.*"])


def _verdicts(row: Mapping[str, Mapping[str, Any]] | None) -> str:
    """One verdict where all guarantees share it, and by what it was found; else the guarantees by verdict."""
    if row is None:
        return "none such"
    by_verdict: dict[str, list[str]] = {}
    for guarantee, finding in row.items():
        if guarantee in GUARANTEES:  # what has left the product is not shown
            by_verdict.setdefault(finding["verdict"], []).append(guarantee)
    if list(by_verdict) == ["unsafe"]:
        return f"unsafe ({seen_by(row['patched']['reason'])})"
    return "; ".join(f"{', '.join(of)} {verdict}" for verdict, of in by_verdict.items())


def main() -> None:
    """Put the tables into the page, each between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    for begin, end, table in ((BEGIN, END, measured(beds())), (BUILDS_BEGIN, BUILDS_END, built(certified()))):
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
