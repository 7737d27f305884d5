"""What was measured as one JSON document, and as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from kamera.cli.output import listing, nan_to_null
from kamera.trust import Estimate
from lab.sabotage.arms import BLIND, SOUND, sabotage
from lab.sabotage.measure import ANSWERS, MARGIN, Asked, Bed, Row
from lab.speed.machine import commit, machine

Document = dict[str, Any]


def document(
    beds: Sequence[Bed], *, command: str, items: int, rank: int, dtype: str, seed: int, seconds: float
) -> Document:
    """Everything measured, and what it was measured with. Only finite numbers and null."""
    return {
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "dtype": dtype,
        "items": items,
        "rank": rank,
        "seed": seed,
        "margin": MARGIN,
        "answers": ANSWERS,
        "seconds": round(seconds, 1),
        "beds": [bed_document(bed) for bed in beds],
    }


def bed_document(bed: Bed) -> Document:
    """All setups of a bed, and the arms each sees."""
    return {
        "world": bed.world,
        "backbone": bed.backbone,
        "blind_to": list(bed.blind_to),
        "seen": {arm: bed.seen(arm) for arm in sabotage(bed.axes)},
        "setups": [_asked(one) for one in bed.asked],
    }


def _asked(one: Asked) -> Document:
    return {
        "name": one.setup.name,
        "asks": one.setup.asks,
        "n": one.n,
        "windows": one.windows,
        "reprefill": _interval(one.reprefill),
        "answered": one.answered,
        "rows": [_row(row) for row in one.rows],
    }


def _row(row: Row) -> Document:
    shown = {name: _interval(getattr(row, name)) for name in ("accuracy", "kl", "eta", "lost", "excess")}
    return {"arm": row.arm, "n": row.n, **shown, "seen": row.seen or None}


def _interval(value: Estimate) -> list[float | None]:
    rounded = [round(number, 4) for number in (value.mean, value.low, value.high)]
    found: list[float | None] = nan_to_null(rounded)
    return found


def tables(found: Mapping[str, Any]) -> Iterator[Table | str]:
    """One table for each bed: accuracy (η) of every arm in every setup, and what nothing sees."""
    for bed in found["beds"]:
        yield ""
        yield listing(f"{bed['backbone']} in {bed['world']}", ("arm", *headings(bed)), list(cells(bed)))
        yield blindness(bed)
    yield ""
    yield (
        "accuracy, with η behind it; ! decisions lost, ~ likelihood lost against the sound arm (95 %, "
        "paired); (…) the backbone cannot do what is asked"
    )


def headings(bed: Mapping[str, Any]) -> list[str]:
    """A column for each setup that has anything to ask, with its number of questions."""
    return [_heading(one) for one in bed["setups"] if one["n"]]


def _heading(one: Mapping[str, Any]) -> str:
    text = f"{one['name']}, n {one['n']}"
    return text if one["answered"] else f"({text})"


def cells(bed: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for the re-prefill and each arm."""
    asked = [one for one in bed["setups"] if one["n"]]
    yield ["re-prefill", *(f"{one['reprefill'][0]:.3f}" for one in asked)]
    for arm in (SOUND, BLIND, *bed["seen"]):
        yield [arm, *(_cell(_find(one, arm), _find(one, BLIND)) for one in asked)]


def _find(one: Mapping[str, Any], arm: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in one["rows"] if row["arm"] == arm)
    return found


def _cell(row: Mapping[str, Any], blind: Mapping[str, Any]) -> str:
    # a share of next to nothing says nothing
    eta = row["eta"][0] if blind["kl"][0] >= MARGIN else None
    mark = {"decisions": " !", "likelihood": " ~"}.get(row["seen"] or "", "")
    if row["arm"] in (SOUND, BLIND):
        mark = ""
    return f"{row['accuracy'][0]:.3f} ({'-' if eta is None else f'{eta:.3f}'}){mark}"


def blindness(bed: Mapping[str, Any]) -> str:
    """What a table of this bed could not tell from a sound operator."""
    if not bed["blind_to"]:
        return "every sabotage fails visibly here"
    named = [f"{arm} (likelihood alone sees it)" if bed["seen"][arm] else arm for arm in bed["blind_to"]]
    return f"this bed is blind to: {', '.join(named)}"
