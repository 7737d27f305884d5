"""``python -m lab.paper``: the paper's tables, regenerated on the trained backbones."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kamera.cli.app import run as run_program
from kamera.cli.options import Device, Form, Precision, Quiet
from kamera.cli.output import Output, listing

FAMILIES = "gqa,deepstack,mla,mha"


program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@program.command()
def paper(
    families: Annotated[
        str, typer.Option(help="Testbed backbones or model directories, separated by commas.")
    ] = FAMILIES,
    world: Annotated[
        list[str] | None,
        typer.Option(help="Cells of these worlds (override, redundant, static; commas), with sabotage."),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Multi-hop questions per row, at least.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Which held-out episodes.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Families measured at a time, one thread each.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub name, instead of the testbed's backbones.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of pictures for --model (lab/paper/pictures.py).")
    ] = None,
    table: Annotated[
        list[int] | None,
        typer.Option(help="Only what this table of the paper needs; may be repeated."),
    ] = None,
    figure: Annotated[list[int] | None, typer.Option(help="Only what this figure needs.")] = None,
    device: Device = None,
    dtype: Precision = "auto",
    format: Form = "table",
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for paper.json, paper.md and the plots (with --world: a file for each cell, left as "
            "it is where it is there, and worlds.md); made if missing.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """The paper's tables on four attention families: deficit, repair frontier, window operations, envelope.

    Prints each claim of the paper beside what was measured.
    """
    from lab.paper import own
    from lab.paper.document import document, write
    from lab.paper.plots import draw
    from lab.paper.report import render
    from lab.paper.run import Findings, family_names, measure_families, tables_of

    out = Output(format, None, quiet)
    if (model is None) != (data is None):
        raise ValueError("--model and --data belong together: give both, or neither for the testbed")
    shown = [f"table {n}" for n in table or ()] + [f"figure {n}" for n in figure or ()]
    wanted = tables_of(shown)
    asked = list(dict.fromkeys(name.strip() for name in families.split(",")))
    held = "float32" if dtype == "auto" else dtype
    if world:
        if model is not None or shown:
            raise ValueError(
                "--world measures all tables of the testbed: leave --model, --table and --figure"
            )
        _measure_cells(asked, world, held, items, seed, output, out)
        return
    names = asked
    command = f"python -m lab.paper --families {','.join(names)} --items {items} --seed {seed} --jobs {jobs}"
    if model is not None and data is not None:
        names = [Path(model).name or model]
        steps = own.measure_own(
            model, data, items=items, seed=seed, tables=wanted, device=device, dtype=dtype
        )
        command = f"python -m lab.paper --model {model} --data {data} --items {items} --seed {seed}"
    else:
        names = family_names(asked)
        command += "" if held == "float32" else f" --dtype {held}"
        steps = measure_families(asked, items=items, seed=seed, jobs=jobs, tables=wanted, dtype=held)
    command += "".join(f" --{one}" for one in shown)
    plots = output is not None and importlib.util.find_spec("matplotlib") is not None
    if output is not None and not plots:
        out.note('no plots: they need matplotlib (pip install "kamera[plots]")')
    started, found, done = time.perf_counter(), {}, dict.fromkeys(names, 0)
    with out.progress(items * len(names), "question") as bar:
        for step in steps:
            if isinstance(step, Findings):
                found[step.family] = step
            else:
                done[step.family] = step.done
                bar.update(sum(done.values()) - bar.n)
    result = document(
        [found[name] for name in names],
        command=command,
        items=items,
        seed=seed,
        jobs=jobs,
        seconds=time.perf_counter() - started,
        **(
            {"dtype": held}
            if data is None
            else {"data": str(data), "dtype": dtype, "device": device or "cpu"}
        ),
    )
    whole = data is None and not shown
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write(result, output / "paper.json")
        figures = draw(result, output) if plots else []
        page = render(result, figures) if whole else own.page(result, figures)
        (output / "paper.md").write_text(page, encoding="utf-8")
        out.note(f"wrote {output}")
    out.write(result, _tables(result) if whole else own.tables(result))


def _measure_cells(
    families: list[str],
    worlds: list[str],
    dtype: str,
    items: int,
    seed: int,
    output: Path | None,
    out: Output,
) -> None:
    """Each cell in turn, kept as soon as it is measured; the page is made of all that lie there."""
    from lab.paper.cells import Cell, measure_cell, worlds_of, write
    from lab.paper.run import Progress, backbone_of, family_names, one_thread
    from lab.paper.worlds import CELLS, page
    from lab.paper.worlds import main as make_page
    from lab.products import WideSums

    found = []
    products = WideSums() if dtype == "bfloat16" else contextlib.nullcontext()
    folder = None if output is None else output / CELLS
    wanted = [
        (path, Cell(name, regime, dtype))
        for regime in worlds_of(worlds)
        for name, path in zip(family_names(families), families, strict=True)
    ]
    for path, cell in wanted:
        file = None if folder is None else folder / f"{cell.name}.json"
        if file is not None and file.exists():
            out.note(f"{cell.name} is there")
            continue
        command = (
            f"python -m lab.paper --families {path} --world {cell.world} --dtype {dtype} --items {items} "
            f"--seed {seed}"
        )
        with one_thread(), products, out.progress(items, f"question of {cell.name}") as bar:
            for step in measure_cell(cell, backbone_of(path, dtype), items=items, seed=seed, command=command):
                if isinstance(step, Progress):
                    bar.update(step.done - bar.n)
                    continue
                found.append(step)
        if file is not None and output is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(found[-1], file)
            make_page(output)
            out.note(f"wrote {file} after {found[-1]['seconds']:.0f} s")
    if output is None:
        out.write({"cells": found}, [page(found)])


def _tables(result: dict[str, Any]) -> Iterator[Table | str]:
    from lab.paper.verdicts import judge_all

    marks = {True: "agrees", False: "differs", None: "-"}
    names = list(result["families"])
    rows = [
        (claim.name, claim.paper, *(f"{by[name].text}: {marks[by[name].agrees]}" for name in names))
        for claim, by in judge_all(result)
    ]
    yield listing(f"at least {result['items']} questions per row", ("claim", "paper", *names), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code (`kamera.cli.app.run`)."""
    return run_program(program, "python -m lab.paper", arguments)


if __name__ == "__main__":
    sys.exit(main())
