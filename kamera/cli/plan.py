"""``kamera plan``: a plan from the trace of windows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.command import command
from kamera.cli.options import Owner
from kamera.cli.output import Output
from kamera.cli.place import StorePlace, store_url
from kamera.compile.mine import plan_text, recurring_windows


@command
def plan_from_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", exists=True, dir_okay=False, help="The file of KameraWindow(trace=…)."
        ),
    ],
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", dir_okay=False, help="Written: a plan for kamera compile.")
    ],
    owner: Owner,
    out: Output,
    system: Annotated[
        str | None, typer.Option(help="The windows' system prompt; a trace holds only its digest.")
    ] = None,
    anchor: Annotated[
        str | None, typer.Option(help="Windows of this system prompt only, by a prefix of its digest.")
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="Fewest equal arrivals of a chunk that count.")] = 2,
    top: Annotated[int | None, typer.Option(min=1, help="At most N windows.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="At most N tokens to prefill for them.")] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="STORE", callback=store_url, help="A store directory, or a remote."),
    ] = None,
) -> None:
    """Make a plan of the recurring windows, the largest savings first.

    With a store, windows end before the first chunk that it does not hold.
    """
    if plan.exists() and plan.samefile(trace):
        raise ValueError(f"PLAN {plan} is the trace: give another file")
    chunks = None
    if store is not None:
        with StorePlace(store, owner).open_answering() as chunk_store:
            chunks = {row.chunk_id for row in chunk_store.ls("canonical")}
    windows = recurring_windows(trace, anchor=anchor, times=times, top=top, tokens=tokens, stored=chunks)
    plan.write_text(plan_text(windows, system), encoding="utf-8")
    out.show({"trace": str(trace), "plan": str(plan), "windows": [asdict(window) for window in windows]})
