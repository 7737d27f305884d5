"""``kamera plan``: a plan from what windows did."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kamera.cli.options import File, Form, Format, Quiet, Tenant
from kamera.cli.output import Output, listing
from kamera.compile.mine import mine, plan_text
from kamera.store import ChunkStore


def plan_from_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", exists=True, dir_okay=False, help="What KameraWindow(trace=…) wrote."
        ),
    ],
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", dir_okay=False, help="Written: a plan for kamera compile.")
    ],
    system: Annotated[
        str | None, typer.Option(help="The windows' system prompt; a trace knows its digest only.")
    ] = None,
    anchor: Annotated[
        str | None, typer.Option(help="Which prompt's windows, by the beginning of its digest.")
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="Arrivals that make a chunk's place recurrent.")] = 2,
    top: Annotated[int | None, typer.Option(min=1, help="At most N windows.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="At most N tokens to prefill for them.")] = None,
    store: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="End windows where this store lacks a chunk."),
    ] = None,
    tenant: Tenant = "",
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Make a plan of the windows that recurred, the most saving first."""
    out = Output(format, output, quiet)
    held = None
    if store is not None:
        with ChunkStore.open(store, tenant=tenant) as opened:
            held = {info.chunk_id for info in opened.ls("canonical")}
    mined = mine(trace, anchor=anchor, times=times, top=top, tokens=tokens, held=held)
    plan.write_text(plan_text(mined, system), encoding="utf-8")
    rows = [(len(m.chunks), m.times, m.saved_tokens, m.forming_tokens) for m in mined]
    columns = ("chunks", "times", "tokens saved", "tokens to form")
    document = {"trace": str(trace), "plan": str(plan), "windows": [asdict(m) for m in mined]}
    out.write(document, [listing(f"{trace} → {plan}: {len(mined)} windows", columns, rows)])
