"""``python -m lab.sabotage.certificates``: what a certificate says of a sound build, and of wrong ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from kamera.cli.app import run as run_program
from kamera.cli.options import Dtype, File, Form, Quiet
from kamera.cli.output import Output, listing
from lab.speed.machine import commit, machine

program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

SOUND = "nothing"
Document = dict[str, Any]


@program.command()
def certificates(
    backbone: Annotated[str, typer.Option(help="A testbed backbone.")] = "gqa",
    dtype: Annotated[Dtype, typer.Option(help="Of the weights and the KV.")] = "float32",
    items: Annotated[int, typer.Option(min=1, help="Questions about each guarantee.")] = 120,
    proofs: Annotated[
        bool, typer.Option(help="Whether the operator is proved on tokens first, or windows alone tell.")
    ] = True,
    format: Form = "table",
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Certify the backbone as it is, and again with one thing wrong at a time in what serves.

    Exit code 0: no guarantee of a wrong build was found safe. 1: one was.
    """
    import torch

    from kamera.engines.hf import HfEngine
    from lab.sabotage.builds import builds, unproved
    from lab.testbed import load

    out = Output(format, output, quiet)
    torch.set_num_threads(1)  # a seed means the same numbers everywhere
    held = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    model, started = HfEngine(*load(backbone, dtype=held)), time.perf_counter()
    with unproved(not proofs):
        rows = {SOUND: certified(model, items)}
        for name, build in builds(model).items():
            out.note(name)
            with build():
                rows[name] = certified(model, items)
    command = f"python -m lab.sabotage.certificates --backbone {backbone} --dtype {dtype} --items {items}"
    found = {
        "command": command if proofs else f"{command} --no-proofs",
        "commit": commit(),
        "machine": machine(),
        "backbone": backbone,
        "dtype": dtype,
        "items": items,
        "proofs": proofs,
        "seconds": round(time.perf_counter() - started, 1),
        "safe_of_wrong_builds": [
            [name, guarantee]
            for name, row in rows.items()
            if name != SOUND
            for guarantee, finding in row.items()
            if finding["verdict"] == "safe"
        ],
        "builds": rows,
    }
    out.write(found, tables(found))
    if found["safe_of_wrong_builds"]:
        raise typer.Exit(1)


def certified(backbone: Any, items: int) -> Document:
    """Verdict, reason and number of questions of each guarantee."""
    from kamera.certify import certify

    made = certify(backbone, probe="world", items=items)
    return {
        guarantee: {"verdict": finding.verdict, "reason": finding.reason, "n": finding.n}
        for guarantee, finding in made.findings.items()
    }


def tables(found: Mapping[str, Any]) -> Iterator[Table | str]:
    """A row for each build, and how many of the wrong ones came out safe."""
    guarantees = list(found["builds"][SOUND])
    yield listing(
        f"{found['backbone']} in {found['dtype']}, {found['items']} questions",
        ("what is wrong", *guarantees, "how it is seen"),
        [cells(name, row) for name, row in found["builds"].items()],
    )
    yield ""
    yield f"safe among the wrong builds: {len(found['safe_of_wrong_builds'])}"


def cells(name: str, row: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """What is wrong, the verdicts, and by what patched KV was found out."""
    seen = "" if row["patched"]["verdict"] == "safe" else seen_by(row["patched"]["reason"])
    return (name, *(finding["verdict"] for finding in row.values()), seen)


def seen_by(reason: str) -> str:
    """Which of the probe's means a reason is from."""
    if "the operator itself is wrong here" in reason:
        return f"proof: {reason.partition(' is off')[0]}"
    if "of chunk " in reason:
        return "the KV of windows"
    return "answers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code (`kamera.cli.app.run`)."""
    return run_program(program, "python -m lab.sabotage.certificates", arguments)


if __name__ == "__main__":
    sys.exit(main())
