"""``kamera eval freeze``: items, windows and pictures of the benchmark of reuse, in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.output import Output


@command
def freeze(
    written: Output,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="testbed, mm-niah, muirbench, ovo-bench, mmlongbench-doc or gui-odyssey."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder of the benchmark, made here.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", exists=True, file_okay=False, help="The set's folder, as published."),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Items, drawn by --seed.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Draws items and traces.")] = 0,
    units: Annotated[
        int,
        typer.Option(min=4, help="Frames, pages or screenshots of a window, if the set has no windows."),
    ] = 8,
    system: Annotated[
        str | None, typer.Option(help="System prompt [default: the chat template's own; the testbed's].")
    ] = None,
) -> None:
    """Write items, traces and pictures to a folder, with a digest that every later run checks."""
    from kamera.eval.reuse import Item, draw_items
    from kamera.eval.reuse import freeze as write
    from kamera.testbed import SYSTEM

    prompt = SYSTEM if system is None and source == "testbed" else system
    origin = {"source": source, "items": items, "seed": seed, "units": units}
    with written.progress(items, "item") as bar:
        rows = []
        for item in draw_items(source, data, count=items, seed=seed, units=units):
            if isinstance(item, Item):
                rows.append(item)
                bar.update()
            else:
                written.note(str(item))
        benchmark = write(rows, out, system=prompt, origin=origin)
    traces = sum(len(item.traces) for item in benchmark.items)
    document = {
        "benchmark": str(out),
        "digest": benchmark.digest,
        "items": len(benchmark.items),
        "questions": traces,
    }
    written.show(document | origin)
