"""``python -m lab.reuse roc | sink``: what a model's KV permits, measured on the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kamera.cli.options import Device, File, Form, Loading, Model, Precision, Quiet
from kamera.cli.output import Output, facts_table, listing
from lab.reuse.charts import Plot, chart, curve
from lab.reuse.invariance import invariance
from lab.reuse.sink import sink_of

Text = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="A text of the model's kind (default: random tokens)."),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]


def roc(
    model: Model,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of content, each at five positions.")] = 64,
    text: Text = None,
    seed: Seed = 0,
    plot: Plot = None,
    device: Device = None,
    dtype: Precision = "auto",
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Which channels mean the same at every position: area under the ROC curve, over all thresholds.

    1.0: equal content at two positions is always more alike than unequal content; 0.5: chance.
    """
    out = Output(format, output, quiet)
    backbone = Loading(device, dtype).load(model, show_progress=out.shows_progress)
    found = invariance(backbone, blocks=blocks, text=_read(text), seed=seed)
    by_channel: dict[str, list[Any]] = {}
    for one in found:
        by_channel.setdefault(one.channel, []).append(one)
    rows = [
        (
            name,
            "phased" if held[0].phased else "free",
            *(round(v, 3) for v in _spread([one.as_stored for one in held])),
            *(round(v, 3) for v in _spread([one.moved for one in held])),
        )
        for name, held in by_channel.items()
    ]
    columns = ("channel", "", "as stored", "least", "most", "moved", "least", "most")
    out.write(
        {"model": model, "blocks": blocks, "text": _name(text), "roc": [asdict(one) for one in found]},
        [listing(f"{model}: AUC of position invariance, mean over layers", columns, rows)],
    )
    names = [f"{one.channel} {one.layer}" for one in found]
    series = {"as stored": [one.as_stored for one in found], "moved": [one.moved for one in found]}
    chart(plot, names, series, "AUC")


def sink(
    model: Model,
    segments: Annotated[int, typer.Option(min=1, help="Segments to compare.")] = 16,
    text: Text = None,
    seed: Seed = 0,
    plot: Plot = None,
    device: Device = None,
    dtype: Precision = "auto",
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """How many first tokens of a prompt a stored segment must stand behind, and must never replace.

    Segments are computed behind the first tokens alone and compared with those behind the whole prompt.
    """
    out = Output(format, output, quiet)
    backbone = Loading(device, dtype).load(model, show_progress=out.shows_progress)
    found = sink_of(backbone, segments=segments, text=_read(text), seed=seed)
    none = "none: the drift falls with every further token of context"
    size = none if found.tokens is None else f"the first {found.tokens} tokens"
    where = "in each segment's own first tokens" if found.local else "at the prompt's start"
    points = [(p.tokens, round(p.edge, 4), round(p.rest, 4), round(p.kl, 5)) for p in found.points]
    out.write(
        {"model": model, "segments": segments, "text": _name(text), **asdict(found)},
        [
            facts_table(model, [("sink", size), ("without it, drift lies", where)]),
            listing("", ("first tokens", "drift of 4 first", "drift of the rest", "KL (nats)"), points),
        ],
    )
    series = {"first 4 tokens": [p.edge for p in found.points], "the rest": [p.rest for p in found.points]}
    mark = None if found.tokens is None else (float(found.tokens), "sink")
    labels = ("first tokens of the prompt", "relative difference")
    curve(plot, [p.tokens for p in found.points], series, labels, mark)


def _read(path: Path | None) -> str | None:
    return None if path is None else path.read_text(encoding="utf-8")


def _name(path: Path | None) -> str:
    return "random tokens" if path is None else str(path)


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    held = list(values)
    return sum(held) / len(held), min(held), max(held)
