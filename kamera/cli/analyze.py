"""``kamera analyze recovery|shift|roc|sink|breakeven``: what reuse can gain, and what a model permits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kamera.cli.command import command
from kamera.cli.options import Loading, Model
from kamera.cli.output import Output
from kamera.store.keys import KVForm

if TYPE_CHECKING:
    from kamera.analyze.requests import Requests
    from kamera.engines.hf import HfEngine

FORMS: tuple[KVForm, ...] = get_args(KVForm)

TraceFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        exists=True,
        dir_okay=False,
        help='JSON lines, {"messages": […], "tools": […], "service": …} each (default: an example). recovery '
        "and shift also take the file of KameraWindow(trace=…).",
    ),
]
Carved = Annotated[int, typer.Option("--sink", min=0, help="First tokens that are run in any case.")]
Room = Annotated[int, typer.Option(min=64, help="Tokens of the window whose positions are compared.")]


@command
def recovery(model: Model, loading: Loading, out: Output, trace: TraceFile = None, sink: Carved = 32) -> None:
    """Tokens that came before: at hand in an exact prefix, recovered at any place, or novel.

    Each request is compared with all before it. Nothing runs: the model gives its tokens alone. "blocks" is
    what hashing aligned blocks of 64 tokens would have recovered.
    """
    from kamera.analyze import recovery as measured

    _, requests = _read(model, loading, out, trace)
    out.show({"model": model, "trace": _name(trace), **measured(requests, sink=sink)})


@command
def shift(model: Model, loading: Loading, out: Output, trace: TraceFile = None, sink: Carved = 32) -> None:
    """Predict what reuse behind the prefix gains, from where requests first vary and how much is new.

    The first half of each service's requests predicts the recovered share of the second half.
    """
    from kamera.analyze import shift as measured

    _, requests = _read(model, loading, out, trace)
    out.show({"model": model, "trace": _name(trace), **measured(requests, sink=sink)})


@command
def roc(
    model: Model,
    loading: Loading,
    out: Output,
    trace: TraceFile = None,
    blocks: Annotated[int, typer.Option(min=2, help="Pieces of text, each at five positions.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a piece.")] = 16,
    room: Room = 4096,
    seed: Annotated[int, typer.Option(help="Which pairs are drawn.")] = 0,
) -> None:
    """Which channels of the KV mean the same at every position: area under the ROC curve.

    1.0: equal text at two positions is always more alike than unequal text; 0.5: chance.
    """
    from kamera.analyze import ids_of
    from kamera.analyze import roc as measured

    engine, requests = _read(model, loading, out, trace)
    ids = ids_of(engine, requests, tokens)
    with out.progress_callback("piece") as advance:
        found = measured(engine, ids, blocks=blocks, tokens=tokens, room=room, seed=seed, advance=advance)
    out.show({"model": model, "trace": _name(trace), **found})


@command
def sink(
    model: Model,
    loading: Loading,
    out: Output,
    trace: TraceFile = None,
    chunk: Annotated[int, typer.Option(min=33, help="Tokens of the chunk whose attention is read.")] = 128,
    room: Room = 1024,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the trace to average over.")] = 4,
) -> None:
    """Where a chunk's attention goes: to its own first 32 tokens (W), or to the prompt's (S), by position."""
    from kamera.analyze import ids_of
    from kamera.analyze import sink as measured

    engine, requests = _read(model, loading, out, trace)
    ids = ids_of(engine, requests, chunk)
    with out.progress_callback("place") as advance:
        found = measured(engine, ids, chunk=chunk, room=room, samples=samples, advance=advance)
    out.show({"model": model, "trace": _name(trace), **found})


@command
def breakeven(
    model: Model,
    loading: Loading,
    out: Output,
    trace: TraceFile = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the chunk.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Times are medians of so many.")] = 3,
    kv: Annotated[
        list[str] | None,
        typer.Option(
            "--kv", help=f"Form of stored KV, of {', '.join(FORMS)}; again for more (default: all)."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Disk of the stores (default: temporary files)."),
    ] = None,
) -> None:
    """After how many reuses a stored chunk has repaid its forming and writing, reading included (f*)."""
    from kamera.analyze import breakeven as measured
    from kamera.analyze import ids_of

    unknown = [form for form in kv or () if form not in FORMS]
    if unknown:  # checked before the model is loaded
        raise ValueError(f"--kv {unknown[0]!r} is none of {', '.join(FORMS)}")
    engine, requests = _read(model, loading, out, trace)
    ids = ids_of(engine, requests, tokens)
    with out.progress_callback("store") as advance:
        found = measured(
            engine,
            ids,
            tokens=tokens,
            rounds=rounds,
            forms=[form for form in FORMS if form in (kv or FORMS)],
            folder=folder,
            advance=advance,
        )
    columns = {
        "rows": [
            "form",
            "bytes",
            "prefill",
            "miss",
            "hit",
            "read",
            "invested",
            "saved",
            "f_star",
            "f_star_tokens",
        ]
    }
    out.show({"model": model, "trace": _name(trace), **found}, columns)


def _read(model: str, loading: Loading, out: Output, trace: Path | None) -> tuple[HfEngine, Requests]:
    from kamera.analyze import read_requests

    engine = loading.load(model, show_progress=out.shows_progress)
    return engine, read_requests(engine, trace)


def _name(trace: Path | None) -> Any:
    return "example" if trace is None else str(trace)
