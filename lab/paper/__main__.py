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
from kamera.cli.options import Form, Format, Quiet
from kamera.cli.output import Output, listing

FAMILIES = "gqa,deepstack,mla,mha"


program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@program.command()
def paper(
    families: Annotated[str, typer.Option(help="Which testbed backbones, separated by commas.")] = FAMILIES,
    items: Annotated[int, typer.Option(min=1, help="Multi-hop questions per row, at least.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Which held-out episodes.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Families measured at a time, one thread each.")] = 1,
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
    from lab.paper.document import document, write
    from lab.paper.plots import draw
    from lab.paper.report import render
    from lab.paper.run import Findings, measure_families

    out = Output(format, None, quiet)
    names = list(dict.fromkeys(name.strip() for name in families.split(",")))
    plots = output is not None and importlib.util.find_spec("matplotlib") is not None
    if output is not None and not plots:
        out.note('no plots: they need matplotlib (pip install "kamera[plots]")')
    started, found, done = time.perf_counter(), {}, dict.fromkeys(names, 0)
    with out.progress(items * len(names), "question") as bar:
        for step in measure_families(names, items=items, seed=seed, jobs=jobs):
            if isinstance(step, Findings):
                found[step.family] = step
            else:
                done[step.family] = step.done
                bar.update(sum(done.values()) - bar.n)
    result = document(
        [found[name] for name in names],
        command=f"python -m lab.paper --families {','.join(names)} --items {items} --seed {seed} "
        f"--jobs {jobs}",
        items=items,
        seed=seed,
        jobs=jobs,
        seconds=time.perf_counter() - started,
    )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write(result, output / "paper.json")
        figures = draw(result, output) if plots else []
        (output / "paper.md").write_text(render(result, figures), encoding="utf-8")
        out.note(f"wrote {output}")
    out.write(result, _tables(result))


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
