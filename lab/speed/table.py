"""A benchmark's result: rows of figures, and everything one needs to know to get them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kamera.engines.hf import HfEngine, describe
from lab.speed.machine import commit, machine
from lab.speed.presets import Preset
from lab.speed.settings import Settings
from lab.speed.timing import Measured, Spread

GOALS = "Goals"
"""Title of the section that holds goals against figures: rows of goal, "at most" or "at least", is, met."""

Cell = str | int | float | bool | Spread | Mapping[str, float] | None
"""A `Spread` read back from JSON is a mapping."""

Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Section:
    """One table: rows of named cells. A unit is said in the name ("slide ms"); None is a dash."""

    title: str
    rows: tuple[Row, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Every name a row has, in the order they first come."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))


@dataclass(frozen=True)
class Result:
    """What a benchmark found, and the command, commit, machine and model it was found with."""

    name: str
    settings: Settings
    model: Mapping[str, Any]
    sections: tuple[Section, ...]
    machine: Mapping[str, Any]
    commit: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """One JSON-able document; a `Spread` is ``{"median", "low", "high"}``."""
        return {
            "benchmark": self.name,
            "command": self.settings.command(self.name),
            "commit": self.commit,
            "settings": self.settings.to_info(),
            "model": dict(self.model),
            "machine": dict(self.machine),
            "sections": [
                {
                    "title": section.title,
                    "rows": [{name: _plain(cell) for name, cell in row.items()} for row in section.rows],
                }
                for section in self.sections
            ],
            "notes": list(self.notes),
        }


def result(
    name: str,
    settings: Settings,
    model: Mapping[str, Any],
    sections: Sequence[Section],
    notes: Sequence[str] = (),
) -> Result:
    """A result of this machine and this checkout."""
    here = {**machine(settings.device), "threads": settings.threads}
    return Result(name, settings, model, tuple(sections), here, commit(), tuple(notes))


def times(timed: Measured, arm: str) -> Row:
    """The cells that say how long an arm took, in milliseconds; on a GPU also by the device's clock."""
    own = timed.device_spread(arm)
    device = {} if own is None else {"device ms": own.times(1e3)}
    return {"ms": timed.spread(arm).times(1e3), **device}


def model_facts(shape: Preset, backbone: HfEngine) -> dict[str, Any]:
    """What a result says of its model."""
    described = describe(backbone)
    return {
        "checkpoint": shape.checkpoint,
        "stands for": shape.stands_for,
        "class": described.model_class,
        "family": described.family,
        "layers": described.layers,
        "of": shape.text["num_hidden_layers"],
        "vocabulary": int(backbone.config.vocab_size),
        "KV bytes per token": described.bytes_per_token,
    }


def goal(text: str, found: Spread | float, *, most: float | None = None, least: float | None = None) -> Row:
    """One row of the section `GOALS`: what was wanted (one of the two bounds) and what is (the median)."""
    value = found.median if isinstance(found, Spread) else found
    if most is not None:
        return {"goal": text, "at most": most, "is": found, "met": value <= most}
    if least is not None:
        return {"goal": text, "at least": least, "is": found, "met": value >= least}
    raise ValueError(f"goal {text!r} has no bound")


def preset_line(document: Mapping[str, Any]) -> str:
    """Preset, depth and dtype of a result's JSON document, and its device unless that is the CPU."""
    settings = document["settings"]
    cut = "all layers" if settings["layers"] is None else f"{settings['layers']} layers"
    where = "" if settings["device"] == "cpu" else f", {settings['device']}"
    return f"{settings['preset']}, {cut}, {settings['dtype']}{where}"


def machine_line(document: Mapping[str, Any]) -> str:
    """Processor or GPU, threads and versions."""
    held = document["machine"]
    wanted = ("gpu", "processor", "cores", "threads", "memory GiB", "torch", "transformers", "triton", "cuda")
    return ", ".join(f"{name} {held[name]}" for name in wanted if name in held)


def headings(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of what a result was measured with, from its JSON document."""
    yield "preset", preset_line(document)
    yield "model", ", ".join(f"{name} {value}" for name, value in document["model"].items())
    yield "machine", ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    yield "commit", document["commit"]
    yield "command", document["command"]


def shown(cell: Any, *, spread: bool = True) -> str:
    """A cell of a result or of its JSON document for people: three figures, spread behind the median."""
    if cell is None:
        return "–"
    if isinstance(cell, Spread):
        cell = asdict(cell)
    if isinstance(cell, Mapping):
        middle = _short(cell["median"])
        return f"{middle} ({_short(cell['low'])}..{_short(cell['high'])})" if spread else middle
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return _short(cell) if isinstance(cell, float) else str(cell)


def _short(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(cell: Cell) -> Any:
    """Five figures are more than any of this is worth."""
    if isinstance(cell, Spread):
        return {name: _rounded(value) for name, value in asdict(cell).items()}
    return _rounded(cell) if isinstance(cell, float) else cell


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
