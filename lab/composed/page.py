"""The tables of docs/results/composed.md, out of docs/results/composed.

python -m lab.composed.page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.composed import removal
from lab.composed.windows import served

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "composed"
GOALS = {"any order": 0.9, "new company": 0.9, "oldest left": 0.95, "middle left": 0.95}
ARMS = ("composed", "composed, known", "triples, known", "fold", "difference", "linear", "orbit", "old patch")
SABOTAGES = ("SABOTAGE swapped", "SABOTAGE other triples", "SABOTAGE random", "SABOTAGE another's")


def beds() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By family and world, what was measured of each number of antecedents, ascending."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        family = Path(document["family"]).name
        found.setdefault((family, document["world"]), []).extend(document["counts"])
    return {bed: sorted(counts, key=lambda c: int(c["count"])) for bed, counts in sorted(found.items())}


def verdict(arm: dict[str, float], goal: float) -> str:
    """Whether a goal is met by the whole interval, by the mean alone, or missed."""
    if arm["low"] >= goal:
        return "met"
    return "met by the mean" if arm["eta"] >= goal else "**missed**"


def reached(arm: dict[str, float], goal: float) -> str:
    """η of an arm, its interval, and the verdict."""
    return f"**{arm['eta']:.3f}** [{arm['low']:.2f}, {arm['high']:.2f}] {verdict(arm, goal)}"


def lines() -> Iterator[str]:
    """Markdown: a table per bed, and one of doubt."""
    for (family, world), counts in beds().items():
        yield f"### {family}, {world}\n"
        names = [name.replace("SABOTAGE ", "sabotage: ") for name in (*ARMS, *SABOTAGES)]
        yield f"| K | window | n | goal | served: pairs | served: triples | {' | '.join(names)} |"
        yield "|" + "---|" * (6 + len(names))
        for count in counts:
            for task, found in count["tasks"].items():
                arms, goal = found["arms"], GOALS[task]
                ours = [arms.get(name) for name in (served(task, count["count"]), "triples")]
                others = [arms.get(name) for name in (*ARMS, *SABOTAGES)]
                rest = [f"{arm['eta']:.3f}" if arm else "-" for arm in others]
                shown = (count["count"], task, found["items"], goal)
                cells = (*shown, *(reached(arm, goal) if arm else "-" for arm in ours), *rest)
                yield f"| {' | '.join(map(str, cells))} |"
        yield ""
    yield "### Doubt\n"
    yield "| bed | K | rank correlation with loss | largest doubt | η of all | η of the least doubtful half |"
    yield "|---|---|---|---|---|---|"
    for (family, world), counts in beds().items():
        for count in counts:
            told = count["doubt"]["doubt"]
            whole, half = told["kept"]["100%"], told["kept"]["50%"]
            signs = (told["rank correlation"], whole["up to"], whole["eta"], half["eta"])
            yield f"| {family}, {world} | {count['count']} | " + " | ".join(f"{x:.3f}" for x in signs) + " |"
    yield ""
    yield "### What has left\n"
    yield from removal.lines(RESULTS / "removal")


if __name__ == "__main__":
    print("\n".join(lines()))
