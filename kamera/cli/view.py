"""``kamera view``: a window's life as a page, from a trace or from what was saved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import typer

from kamera.cli.command import command
from kamera.cli.options import Form, Quiet, writable
from kamera.cli.output import Output
from kamera.cli.snapshot import events_in
from kamera.errors import StoreError
from kamera.window import Event, read_events, read_trace
from kamera.window.view import page


@command
def view(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|SESSION|POOL|URL",
            help="A trace, a saved window or session, a pool's directory, or a trace's http(s) address.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            dir_okay=False,
            callback=writable,
            help="The page to write (default: SOURCE's name, here).",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    format: Form = "table",
    quiet: Quiet = False,
) -> None:
    """Show a window's life: every chunk over time, what ran, and what a prefix cache would have run.

    The page is one file that loads nothing from elsewhere. A trace has ids, numbers and times; with
    Trace(FILE, content=True) it also has texts and pictures.
    """
    name, events = re.split(r"[/\\?#]", source.rstrip("/"))[-1], _events(source)
    path = output or Path(f"{Path(name).stem or 'window'}.html")
    path.write_text(page(events, title=title or name), encoding="utf-8")
    out = Output(format, None, quiet)
    out.note(f"{len(events)} operations")
    with out.lines() as write:
        write(str(path), {"source": source, "page": str(path), "operations": len(events)})


def _events(source: str) -> Sequence[Event]:
    if re.match(r"https?://", source):
        try:
            with urlopen(source, timeout=60) as answer:
                return list(read_events(answer.read(), source))
        except URLError as error:
            raise StoreError(f"{source} does not answer ({error.reason}): give a trace's address") from None
    path = Path(source)
    if path.is_dir():
        return events_in(path)
    if not path.exists():
        raise ValueError(f"nothing is at {source!r}: give a trace, a saved session or window, or an address")
    return list(read_trace(path))
