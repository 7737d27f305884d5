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
from kamera.compile.mine import mine, plan_text
from kamera.compile.placing import place as place_windows
from kamera.store import ObjectInfo

_RUN = ("arrived_forwards", "arrived_tokens", "placed_forwards", "placed_tokens")


@command
def plan_from_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", exists=True, dir_okay=False, help="The file of KameraWindow(trace=…)."
        ),
    ],
    owner: Owner,
    out: Output,
    plan: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN", dir_okay=False, help="The plan to write, for kamera compile."),
    ] = None,
    place: Annotated[
        bool, typer.Option("--place", help="Print what each window runs in the best order; no PLAN.")
    ] = False,
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

    With a store, a window ends before the first chunk that is not in it. With --place, print what each
    window runs in the order of arrival, and in the order that kamera.window.Assemble chooses, with the
    objects of earlier windows and of the store.
    """
    if place == (plan is not None):
        raise typer.BadParameter("give a PLAN to write, or --place")
    stored: list[ObjectInfo] | None = None
    if store is not None:
        with StorePlace(store, owner).open_answering() as opened:
            stored = opened.ls()
    document: dict[str, Any] = {"trace": str(trace)}
    if plan is None:
        windows = [asdict(window) for window in place_windows(trace, anchor=anchor, rows=stored or [])]
        total = {name: sum(window[name] for window in windows) for name in _RUN}
        out.show({**document, "windows": windows, "total": total}, {"windows": ("arrived", *_RUN)})
        return
    chunks = None if stored is None else {row.chunk_id for row in stored if row.kind == "canonical"}
    mined = mine(trace, anchor=anchor, times=times, top=top, tokens=tokens, stored=chunks)
    plan.write_text(plan_text(mined, system), encoding="utf-8")
    out.show({**document, "plan": str(plan), "windows": [asdict(window) for window in mined]})
