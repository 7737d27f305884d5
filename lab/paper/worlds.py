"""The page of all cells (`lab.paper.cells`) of a folder: ``python -m lab.paper.worlds [FOLDER]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.paper.cells import ASKED, PART, changed, verdict
from lab.paper.verdicts import CLAIMS, Claim
from lab.sabotage.arms import BLIND, SOUND
from lab.testbed.regimes import REGIMES

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "paper"
CELLS, PAGE = "cells", "worlds.md"
BACKBONES = ("gqa", "mla", "deepstack", "mha", "gqa-unled", "mla-unled")
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}

MEANS = (
    "*redundant*, *static*: the antecedents are legends alone. A rename says otherwise than the legends "
    "before it, so no window of both agrees; three hops are asked in *override* only.",
    "Turnover, one replaced, all replaced: other frames of the same camera come. In *redundant* they mostly "
    "repeat what they replace, and the truth is read from those that stand there now. In *static* they are "
    "the same frame: these claims, reorder, duplication and the update say nothing there.",
    "What left, and what was read from it: in *override* the answers that the items frame had read from the "
    "frame that left. Elsewhere also those which another frame repeats: then the answer has not changed.",
    "Every other claim means the same in each world.",
)

Found = Mapping[str, Any]


def cells(folder: Path) -> list[Found]:
    """Every cell of a folder: dtypes apart, then backbones, then worlds."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=_place)


def _place(cell: Found) -> tuple[int, int, str, int]:
    family, world, dtype = (cell["cell"][name] for name in ("family", "world", "dtype"))
    known = BACKBONES.index(family) if family in BACKBONES else len(BACKBONES)
    return list(DTYPES).index(dtype), known, family, list(REGIMES).index(world)


def page(found: Sequence[Found]) -> str:
    """Claims by cell, the sabotage, and which disagreements are the world's."""
    return "\n".join(_page(found)) + "\n"


def _page(found: Sequence[Found]) -> Iterator[str]:
    yield "# The paper's claims in three worlds"
    yield ""
    yield (
        "`python -m lab.paper --families FAMILY --world WORLD --dtype DTYPE --output FOLDER` measures a "
        "cell: one backbone in one world and dtype. The cells lie in `cells/`, each with its "
        "command, commit and machine; `python -m lab.paper.worlds` makes this page of them. The claims, and "
        "what counts as agreement, are those of [`paper.md`](paper.md)."
    )
    yield ""
    yield from (f"* {line}" for line in MEANS)
    yield ""
    yield "## Claims"
    yield ""
    yield (
        "*n/m*: with n of m wrong operators the verdict is another. Every wrong operator is asked "
        f"1/{PART} of the questions, and the sound one the same. **blind**: no wrong operator changes it, so "
        "it says nothing of the operator (one that differs already may only get worse). Only claims that "
        "serve a patch are asked again (frontier, reorder, recall, survivors, envelope); depth, shared basis "
        "and update serve one too and are not, for their price. –: the claim has no meaning in that world, "
        "or the paper gives no value."
    )
    for dtype, name in DTYPES.items():
        of = [cell for cell in found if cell["cell"]["dtype"] == dtype]
        if of:
            yield ""
            yield f"### {name}, n ≥ {min(cell['items'] for cell in of)} a row"
            yield ""
            heads = [f"{cell['cell']['family']}, {cell['cell']['world']}" for cell in of]
            yield from _table(["claim", *heads], [[c.name, *(_mark(cell, c) for cell in of)] for c in CLAIMS])
    yield ""
    yield from _blindness(found)
    yield ""
    yield from _sabotage(found)
    yield ""
    yield from _worlds(found)
    yield ""
    yield from _measured(found)


def _mark(cell: Found, claim: Claim) -> str:
    said = verdict(cell, claim)
    if said.agrees is None:
        return "–"
    word = "agrees" if said.agrees else "**differs**"
    turned = changed(cell, claim)
    if turned is None:
        return word
    names, of = turned
    return f"{word} {len(names)}/{of}" if names else f"{word} **blind**"


def _blindness(found: Sequence[Found]) -> Iterator[str]:
    yield "## Wrong operators that the claims see"
    yield ""
    yield "Claims whose verdict changes, of those asked again that have one."
    yield ""
    heads = [_head(cell) for cell in found]
    arms = dict.fromkeys(arm for cell in found for arm in cell["wrong"]["changed"])
    rows = []
    for arm in arms:
        row = [arm]
        for cell in found:
            turned = cell["wrong"]["changed"].get(arm)
            row.append("none such" if turned is None else f"{len(turned)}/{len(cell['wrong']['asked'])}")
        rows.append(row)
    yield from _table(["operator", *heads], rows)


def _sabotage(found: Sequence[Found]) -> Iterator[str]:
    yield "## Sabotage"
    yield ""
    yield (
        "Accuracy (η) of each operator on multi-hop questions (*bound*) and on those that the order decides "
        "(*last says*: a legend and a later one say different things), rank-16 patches, setups of "
        "[`sabotage.md`](../../sabotage.md). ! decisions lost, ~ likelihood lost against the sound operator "
        "for certain; –: nothing to ask."
    )
    for setup in ASKED:
        yield ""
        yield f"### {setup}"
        yield ""
        every = [(cell, one) for cell in found for one in cell["bed"]["setups"]]
        with_it = [(cell, one) for cell, one in every if one["name"] == setup and one["n"]]
        if not with_it:
            yield "No question of this kind in these worlds."
            continue
        arms = dict.fromkeys(row["arm"] for _, one in with_it for row in one["rows"])
        rows = [["re-prefill", *(f"{one['reprefill'][0]:.2f}" for _, one in with_it)]]
        rows += [[arm, *(_cell(one, arm) for _, one in with_it)] for arm in arms]
        yield from _table(["operator", *(f"{_head(cell)}, n {one['n']}" for cell, one in with_it)], rows)


def _cell(one: Found, arm: str) -> str:
    row = next((row for row in one["rows"] if row["arm"] == arm), None)
    if row is None:
        return "none such"
    eta = row["eta"][0]
    mark = {"decisions": " !", "likelihood": " ~"}.get(row["seen"] or "", "")
    shown = f"{row['accuracy'][0]:.2f} ({'–' if eta is None else f'{eta:.2f}'})"
    return shown + ("" if arm in (SOUND, BLIND) else mark)


def _worlds(found: Sequence[Found]) -> Iterator[str]:
    yield "## Disagreements, and the worlds they are of"
    yield ""
    yield "Backbones that differ from the paper in each world."
    for dtype, name in DTYPES.items():
        of = [cell["cell"] | {"cell": cell} for cell in found if cell["cell"]["dtype"] == dtype]
        worlds = [world for world in REGIMES if any(one["world"] == world for one in of)]
        if not of:
            continue
        rows: list[list[str]] = []
        kinds: dict[str, list[str]] = {"everywhere": [], "override": [], "other": []}
        for claim in CLAIMS:
            differs = {w: _differing(of, claim, w) for w in worlds}
            if any(differs.values()):
                rows.append([claim.name, *(", ".join(differs[w]) or _silent(of, claim, w) for w in worlds)])
                kinds[_kind(of, claim, differs)].append(claim.name)
        yield ""
        yield f"### {name}"
        yield ""
        yield from _table(["claim", *worlds], rows)
        if len(worlds) == 1:
            continue
        yield ""
        for kind, text in (
            ("everywhere", "In every world that can tell"),
            ("override", "Only where a later frame overrides"),
            ("other", "Elsewhere too, or only elsewhere"),
        ):
            yield f"* {text} ({len(kinds[kind])}): {'; '.join(kinds[kind]) or 'none'}."


def _differing(of: Sequence[Found], claim: Claim, world: str) -> list[str]:
    return [
        one["family"] for one in of if one["world"] == world and verdict(one["cell"], claim).agrees is False
    ]


def _silent(of: Sequence[Found], claim: Claim, world: str) -> str:
    said = [verdict(one["cell"], claim).agrees for one in of if one["world"] == world]
    return "–" if all(agrees is None for agrees in said) else ""


def _kind(of: Sequence[Found], claim: Claim, differs: Mapping[str, list[str]]) -> str:
    telling = [world for world in differs if _silent(of, claim, world) != "–"]
    if all(differs[world] for world in telling):
        return "everywhere" if len(telling) > 1 or telling != ["override"] else "override"
    return "override" if [world for world in telling if differs[world]] == ["override"] else "other"


def _measured(found: Sequence[Found]) -> Iterator[str]:
    yield "## Measured"
    yield ""
    rows = [
        [
            f"[{_head(cell)}]({CELLS}/{'-'.join(cell['cell'].values())}.json)",
            str(cell["items"]),
            str(cell["family"]["episodes"]),
            f"{cell['seconds']:.0f}",
            cell["commit"],
        ]
        for cell in found
    ]
    yield from _table(["cell", "questions a row", "episodes", "seconds", "commit"], rows)


def _head(cell: Found) -> str:
    family, world, dtype = (cell["cell"][name] for name in ("family", "world", "dtype"))
    return f"{family}, {world}, {DTYPES[dtype]}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def main(folder: Path = RESULTS) -> None:
    """Write the page beside the cells of a folder."""
    (folder / PAGE).write_text(page(cells(folder / CELLS)), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
