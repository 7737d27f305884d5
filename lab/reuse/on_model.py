"""``python -m lab.reuse roc | sink | calibrate``: what a model's KV permits, measured on the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kamera.cli.options import Device, Dtype, File, Form, Format, Loading, Model, Precision, Quiet
from kamera.cli.output import Output, facts, listing
from kamera.reuse import HeldOut
from lab.reuse.charts import Plot, chart, curve
from lab.reuse.forwards import texts
from lab.reuse.invariance import invariance
from lab.reuse.sink import sink_of
from lab.reuse.sweep import calibrate as sweep
from lab.reuse.sweep import cases_of

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
    dtype: Precision = Dtype.auto,
    format: Form = Format.table,
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
    dtype: Precision = Dtype.auto,
    format: Form = Format.table,
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
            facts(model, [("sink", size), ("without it, drift lies", where)]),
            listing("", ("first tokens", "drift of 4 first", "drift of the rest", "KL (nats)"), points),
        ],
    )
    series = {"first 4 tokens": [p.edge for p in found.points], "the rest": [p.rest for p in found.points]}
    mark = None if found.tokens is None else (float(found.tokens), "sink")
    labels = ("first tokens of the prompt", "relative difference")
    curve(plot, [p.tokens for p in found.points], series, labels, mark)


def calibrate(
    model: Model,
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Directory for the calibration.")],
    text: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="A text of the kind that will be served.")
    ],
    cases: Annotated[int, typer.Option(min=2, help="Segments to reuse, half of them held out.")] = 160,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Role of the messages it is text of (tool, user, …). Default: none."),
    ] = None,
    bound: Annotated[float, typer.Option(min=0.0, help="Largest accepted drift, KL in nats.")] = 0.05,
    seed: Seed = 0,
    plot: Plot = None,
    device: Device = None,
    dtype: Precision = Dtype.auto,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Sweep left contexts and write the thresholds under which approximate segments may be served.

    Half of the cases are fitted and half held out: there is a threshold if at most 5 % of those accepted may
    drift beyond the bound, or have another next token, at 95 % confidence.

    Exit code 0: there is a threshold. 1: there is none, approximate segments stay refused.
    """
    out = Output(format, output, quiet)
    backbone = Loading(device, dtype).load(model, show_progress=out.shows_progress)
    runs = texts(backbone, 16, 256, text=_read(text))
    documents = [ids.tolist() for ids in runs]
    drawn = cases_of(backbone, documents, count=cases, sources=source or ("",), seed=seed)
    made = sweep(backbone, drawn, bound=bound, model=model)
    path = made.write(folder)
    windows = ", ".join("never" if w is None else str(w) for w in made.windows)
    taken = next((p for p in made.curve if p.threshold == made.threshold), None)
    share = "-" if taken is None else f"{100 * taken.accepted:.1f} % of {made.trials}"
    out.write(
        {
            **asdict(made),
            "violation_limit": made.tested.violation_limit,
            "flip_limit": made.tested.flip_limit,
            "path": str(path),
        },
        [
            facts(
                model,
                [
                    ("fingerprint", made.fingerprint),
                    ("equal left context needed, by layers", windows),
                    ("threshold", "none" if made.threshold is None else f"{made.threshold:.4f}"),
                    ("accepted there", share),
                    ("held out", _held_out(made.tested)),
                    ("with one piece replaced", _held_out(made.replaced)),
                    ("refused", made.refusal or "no"),
                    ("of", f"{', '.join(made.scope)}; from {', '.join(map(repr, made.sources))}"),
                    ("written to", path),
                ],
            )
        ],
    )
    series = {
        "accepted": [p.accepted for p in made.curve],
        "worst KL": [p.worst or 0.0 for p in made.curve],
        "agreement": [p.agreement or 0.0 for p in made.curve],
    }
    mark = None if made.threshold is None else (made.threshold, "operating point")
    curve(plot, [p.threshold for p in made.curve], series, ("least cosine of the probe", ""), mark)
    if made.threshold is None:
        raise typer.Exit(1)


def _held_out(found: HeldOut) -> str:
    return (
        f"{found.accepted} of {found.cases} cases accepted; {found.violations} beyond the bound (at most "
        f"{found.violation_limit:.3f} at 95 %), {found.flips} with another next token "
        f"(at most {found.flip_limit:.3f})"
    )


def _read(path: Path | None) -> str | None:
    return None if path is None else path.read_text(encoding="utf-8")


def _name(path: Path | None) -> str:
    return "random tokens" if path is None else str(path)


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    held = list(values)
    return sum(held) / len(held), min(held), max(held)
