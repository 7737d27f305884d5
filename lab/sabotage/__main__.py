"""``python -m lab.sabotage``: does a table of this world and backbone see a broken operator?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from kamera.cli.app import run as run_program
from kamera.cli.options import Dtype, File, Form, Quiet
from kamera.cli.output import Output

program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no {what} {unknown[0]!r}: there are {', '.join(known)}")
    return names


@program.command()
def sabotage(
    world: Annotated[str, typer.Option(help="Regimes, with commas.")] = "override,redundant,static",
    backbone: Annotated[str, typer.Option(help="Testbed backbones, with commas.")] = "gqa,mla",
    items: Annotated[int, typer.Option(min=1, help="Questions of each setup, at least.")] = 240,
    rank: Annotated[int, typer.Option(min=1, help="Of the patches.")] = 32,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights and the KV.")] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Which held-out episodes.")] = 0,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Serve chunks with one thing wrong at a time, and say which wrongs this world and backbone can see."""
    import torch

    from kamera.engines.hf import HfEngine
    from lab.sabotage.document import document, tables
    from lab.sabotage.measure import Bed, measure
    from lab.testbed import BACKBONES, load
    from lab.testbed.regimes import REGIMES

    out = Output(format, output, quiet)
    worlds = _names(world, list(REGIMES), "world")
    backbones = _names(backbone, BACKBONES, "backbone")
    held = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    torch.set_num_threads(1)  # a seed means the same numbers everywhere
    started, beds = time.perf_counter(), []
    for name in backbones:
        model = HfEngine(*load(name, dtype=held))
        for regime in worlds:
            for step in measure(name, model, regime, items=items, rank=rank, seed=seed):
                if isinstance(step, Bed):
                    beds.append(step)
                else:
                    out.note(step)
    command = (
        f"python -m lab.sabotage --world {','.join(worlds)} --backbone {','.join(backbones)} "
        f"--items {items} --rank {rank} --dtype {dtype} --seed {seed}"
    )
    seconds = time.perf_counter() - started
    found = document(beds, command=command, items=items, rank=rank, dtype=dtype, seed=seed, seconds=seconds)
    out.write(found, tables(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code (`kamera.cli.app.run`)."""
    return run_program(program, "python -m lab.sabotage", arguments)


if __name__ == "__main__":
    sys.exit(main())
