"""``kamera plan``: a plan from the trace of windows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kamera.cli.command import command
from kamera.cli.options import Owner
from kamera.cli.output import Output
from kamera.cli.place import StorePlace, store_url
from kamera.compile.mine import forming_tokens, placed_windows, plan_text, recurring_windows


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
    place: Annotated[
        bool, typer.Option("--place", help="Choose the order of each window, for KameraWindow.assemble.")
    ] = False,
) -> None:
    """Make a plan of the recurring windows, the largest savings first.

    With a store, windows end before the first chunk that it does not hold. With --place the order of each is
    chosen over the whole trace, so that most chunks stand behind the same others; all_given and all_placed
    are tokens to form the patches of all windows, as they came and as placed.
    """
    if plan.exists() and plan.samefile(trace):
        raise ValueError(f"PLAN {plan} is the trace: give another file")
    chunks = None
    if store is not None:
        with StorePlace(store, owner).open_answering() as chunk_store:
            chunks = {row.chunk_id for row in chunk_store.ls("canonical")}
    windows = recurring_windows(
        trace, anchor=anchor, times=times, top=top, tokens=tokens, stored=chunks, place=place
    )
    plan.write_text(plan_text(windows, system), encoding="utf-8")
    rows = [asdict(window) for window in windows]
    document: dict[str, Any] = {"trace": str(trace), "plan": str(plan), "windows": rows}
    if place:
        given, placed, length = placed_windows(trace, anchor=anchor, stored=chunks)
        for name, some in (("all_given", given), ("all_placed", placed)):
            counts = {"windows": len(set(some)), "forming_tokens": forming_tokens(some, length)}
            document[name] = counts
    out.show(document)
