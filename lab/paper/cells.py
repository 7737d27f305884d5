"""The claims on one backbone in one world and dtype: a cell, measured alone and kept as one small file.

A cell holds the rows its verdicts are read from, the verdicts of every wrong operator on the claims that
serve a patch (`lab.paper.wrong`), and a bed of `lab.sabotage` on the same backbone and world.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.paper import envelope, frontier, refresh, reorder
from lab.paper.document import Document, View, commit, plain
from lab.paper.draw import RANK, Stage
from lab.paper.judges import Verdict
from lab.paper.run import TABLES, Findings, Progress, measure_family
from lab.paper.tally import MULTI, ONE, Tally
from lab.paper.verdicts import CLAIMS, Claim, judged
from lab.paper.wrong import Wrong
from lab.sabotage.arms import SOUND
from lab.sabotage.document import bed_document
from lab.sabotage.measure import Bed, measure
from lab.sabotage.setups import SETUPS
from lab.speed.machine import machine
from lab.testbed.regimes import REGIMES

NOTHING_CHANGES = (reorder.NAME, envelope.NAME, refresh.NAME)
"""Tables about antecedents that differ: left out where all of them are one frame."""
ASKED = ("bound", "last says")
"""Setups of the sabotage: multi-hop questions, and one that the order decides."""
PART = 4
"""Every wrong operator is asked this part of the questions."""

_MEANS = ("kl", "eta", "flip_recover")
_KEPT = ("section", "setting", "arm", "kind", "n", "accuracy", "kl", "eta", "flip_recover", "share")


@dataclass(frozen=True)
class Cell:
    """A backbone by name, a regime of the world, and a dtype of weights and KV."""

    family: str
    world: str
    dtype: str

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return f"{self.family}-{self.world}-{self.dtype}"

    @property
    def tables(self) -> tuple[str, ...]:
        """What can be measured in this world."""
        return tuple(t for t in TABLES if self.world != "static" or t not in NOTHING_CHANGES)


def worlds_of(names: Sequence[str]) -> list[str]:
    """Names of regimes, repeated or joined by commas. Raises ValueError for an unknown one."""
    found = list(dict.fromkeys(name.strip() for text in names for name in text.split(",")))
    if unknown := [name for name in found if name not in REGIMES]:
        raise ValueError(f"no world {unknown[0]!r}: there are {', '.join(REGIMES)}")
    return found


def measure_cell(
    cell: Cell, backbone: HfEngine, *, items: int, seed: int, command: str
) -> Iterator[Progress | Document]:
    """At last the cell's document; ``items`` multi-hop questions a row, a quarter under wrong operators."""
    started = time.perf_counter()
    part = max(1, items // PART)
    wrong = Wrong(backbone.axes, part, cell.tables)
    make = partial(Stage, regime=cell.world)
    steps = measure_family(
        cell.family,
        backbone,
        items,
        seed,
        tables=cell.tables,
        make=make,
        system=testbed.SYSTEM,
        also=wrong.measure,
    )
    found: Findings | None = None
    for step in steps:
        if isinstance(step, Progress):
            yield step
        else:
            found = step
    assert found is not None, "a family ends with its findings"
    setups = tuple(setup for setup in SETUPS if setup.name in ASKED)
    half = max(1, items // 2)
    asked = measure(cell.family, backbone, cell.world, items=half, rank=RANK, seed=seed, setups=setups)
    bed = next(step for step in asked if isinstance(step, Bed))
    family = {
        "model": found.model,
        "layers": found.layers,
        "episodes": found.episodes,
        "rows": keep_rows([plain(vars(row)) for row in found.rows]),
        "numbers": [_slim(plain(vars(number))) for number in found.numbers],
    }
    yield {
        "cell": vars(cell),
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "items": items,
        "items under wrong operators": part,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        "family": family,
        "wrong": _changes({name: _verdicts(cell, family, tally) for name, tally in wrong.tallies.items()}),
        "bed": bed_document(bed),
    }


def verdict(cell: Mapping[str, Any], claim: Claim) -> Verdict:
    """What a cell says of a claim; none where it has no meaning in the world."""
    return _judged(Cell(**cell["cell"]), claim, cell["family"])


def changed(cell: Mapping[str, Any], claim: Claim) -> tuple[list[str], int] | None:
    """The wrong operators that change the verdict, and how many there are; None where none was asked.

    The verdict they change is the sound operator's on the same questions.
    """
    wrong = cell["wrong"]
    if claim.name not in wrong["asked"]:
        return None
    return [name for name, turned in wrong["changed"].items() if claim.name in turned], len(wrong["changed"])


def write(cell: Document, path: Path) -> None:
    """One row a line; the file appears whole or not at all."""
    parts: dict[str, str] = {}
    family = dict(cell["family"])
    for part in ("rows", "numbers"):
        marker = f"<{part}>"
        lines = ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in family[part])
        parts[json.dumps(marker)], family[part] = f"[\n{lines}\n  ]", marker
    whole = {**cell, "family": family}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)
    for marker, lines in parts.items():
        text = text.replace(marker, lines)
    making = path.with_suffix(".part")
    making.write_text(text + "\n", encoding="utf-8")
    making.replace(path)


def _judged(cell: Cell, claim: Claim, family: Mapping[str, Any]) -> Verdict:
    if claim.differing and cell.world == "static":
        return Verdict("nothing differs", None)
    found = judged(claim, View(cell.family, family))
    # nan: nothing to measure it on
    return Verdict(found.text, None) if "nan" in found.text else found


def _verdicts(cell: Cell, family: Mapping[str, Any], tally: Tally) -> dict[str, bool | None]:
    """Every claim that serves a patch, its rows replaced by those of another operator."""
    rows = {_key(row): row for row in family["rows"]}
    rows |= {_key(row): row for row in keep_rows([plain(vars(row)) for row in tally.rows()])}
    numbers = {_key(number): number for number in family["numbers"]}
    numbers |= {_key(n): n for n in (_slim(plain(vars(number))) for number in tally.numbers())}
    under = {**family, "rows": list(rows.values()), "numbers": list(numbers.values())}
    return {claim.name: _judged(cell, claim, under).agrees for claim in CLAIMS if claim.served}


def _changes(verdicts: Mapping[str, Mapping[str, bool | None]]) -> Document:
    """What the sound operator's verdicts are, and which of them each wrong one changes."""
    asked = {claim: agrees for claim, agrees in verdicts[SOUND].items() if agrees is not None}
    return {
        "asked": asked,
        "changed": {
            name: [claim for claim, agrees in asked.items() if by[claim] is not agrees]
            for name, by in verdicts.items()
            if name != SOUND
        },
    }


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([row.get(part) for part in ("section", "name", "arm", "kind", "setting")])


def keep_rows(rows: Sequence[Document]) -> list[Document]:
    """What a verdict may be read from: multi-hop questions, and the one-hop control of the frontier.

    Intervals are kept of accuracy alone: no verdict reads another.
    """
    control = {"section": frontier.NAME, "kind": ONE, "setting": {}}
    found = []
    for row in rows:
        if row["kind"] == MULTI or all(row[name] == value for name, value in control.items()):
            kept = {name: row[name] for name in _KEPT}
            kept |= {name: None if row[name] is None else row[name][:1] for name in _MEANS}
            found.append(_slim(kept))
    return found


def _slim(row: Document) -> Document:
    """Four digits of every figure."""

    def short(value: Any) -> Any:
        if isinstance(value, list):
            return [short(one) for one in value]
        return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value

    return {name: short(value) for name, value in row.items()}
