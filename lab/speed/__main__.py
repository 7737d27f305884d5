"""``python -m lab.speed NAME``: how fast, against what, on this machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from kamera.cli.app import run as run_program
from kamera.cli.options import Device, Dtype, File, Form, Quiet
from kamera.cli.output import Output, facts_table, listing
from lab.speed.settings import Settings, Step
from lab.speed.table import Result, headings, shown


class Benchmark(str, Enum):
    """Each one a module of `lab.speed` (`lab.speed.settings.NAMES`)."""

    apply = "apply"
    kernel = "kernel"
    serve = "serve"
    window = "window"
    growth = "growth"
    store = "store"
    compile = "compile"


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers: give them as 256,512,1024") from None


program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@program.command()
def bench(
    name: Annotated[Benchmark, typer.Argument(metavar="NAME", help="What is measured.")],
    preset: Annotated[
        str, typer.Option(help="A published model's shape, weights random: qwen2.5-vl-7b, kimi-vl-a3b, …")
    ] = "qwen2.5-vl-7b",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Cut decoder and vision tower to this depth (default: all).")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a chunk, with commas.")] = "256,512,1024,2048",
    chunks: Annotated[str, typer.Option(help="Chunks in a window, with commas.")] = "4,8,16,32,64",
    stored: Annotated[str, typer.Option(help="Chunks in a store, with commas.")] = "100,1000,10000,100000",
    device: Device = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights and the KV.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads torch computes with on the CPU.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="At most this many rounds; all arms run in each.")] = 20,
    min_rounds: Annotated[int, typer.Option(min=1, help="At least this many, however long they take.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.0, help="Aim at this long for one line of a table.")] = 20.0,
    same_weights: Annotated[
        bool,
        typer.Option(
            "--same-weights", help="All layers hold one layer's weights: full depth, little memory."
        ),
    ] = False,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Measure one thing Kamera does against what it replaces, side by side in one run.

    apply: a stored segment into its slot. kernel: the same on a GPU, its kernels alone. serve: the whole
    time to a first token. window: every window operation. growth: the same as windows and stores grow.
    store: from disk to attention. compile: forming patches.
    """
    out = Output(format, output, quiet)
    settings = Settings(
        preset=preset,
        layers=layers,
        lengths=_numbers(lengths),
        chunks=_numbers(chunks),
        stored=_numbers(stored),
        device=device or "cpu",
        dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
        threads=threads,
        rounds=rounds,
        min_rounds=min(min_rounds, rounds),
        seconds=seconds,
        same_weights=same_weights,
    )
    measure: Callable[[Settings, Step], Result] = importlib.import_module(f"lab.speed.{name.value}").run
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with out.progress_callback("line") as step:
            found = measure(settings, step)
    finally:
        torch.set_num_threads(before)
    document = found.to_json()
    out.write(document, _tables(document))


def _tables(document: dict[str, Any]) -> Iterator[Table | str]:
    yield facts_table(document["benchmark"], headings(document))
    for section in document["sections"]:
        columns = list(dict.fromkeys(c for row in section["rows"] for c in row))
        yield ""
        yield listing(
            section["title"], columns, [[shown(row.get(c)) for c in columns] for row in section["rows"]]
        )
    for note in document["notes"]:
        yield f"* {note}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code (`kamera.cli.app.run`)."""
    return run_program(program, "python -m lab.speed", arguments)


if __name__ == "__main__":
    sys.exit(main())
