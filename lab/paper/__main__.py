"""``python -m lab.paper``: the paper's tables, regenerated on the trained backbones."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kamera.cli.app import run as run_program
from kamera.cli.options import Device, Dtype, Form, Format, Precision, Quiet
from kamera.cli.output import Output, listing

FAMILIES = "gqa,deepstack,mla,mha"


program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@program.command()
def paper(
    families: Annotated[str, typer.Option(help="Which testbed backbones, separated by commas.")] = FAMILIES,
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
    dtype: Precision = Dtype.auto,
    format: Form = Format.table,
    output: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for paper.json, paper.md and the plots; made if missing."),
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
    from lab.paper.run import Findings, measure_families, tables_of

    out = Output(format, None, quiet)
    if (model is None) != (data is None):
        raise ValueError("--model and --data belong together: give both, or neither for the testbed")
    shown = [f"table {n}" for n in table or ()] + [f"figure {n}" for n in figure or ()]
    wanted = tables_of(shown)
    names = list(dict.fromkeys(name.strip() for name in families.split(",")))
    command = f"python -m lab.paper --families {','.join(names)} --items {items} --seed {seed} --jobs {jobs}"
    if model is not None and data is not None:
        names = [Path(model).name or model]
        steps = own.measure_own(
            model, data, items=items, seed=seed, tables=wanted, device=device, dtype=dtype
        )
        command = f"python -m lab.paper --model {model} --data {data} --items {items} --seed {seed}"
    else:
        steps = measure_families(names, items=items, seed=seed, jobs=jobs, tables=wanted)
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
        **({} if data is None else {"data": str(data), "dtype": dtype.value, "device": device or "cpu"}),
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
