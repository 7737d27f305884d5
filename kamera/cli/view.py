"""``kamera view``: a window's life as a page, from a trace."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import typer

from kamera.cli.options import Quiet
from kamera.cli.output import Output
from kamera.errors import StoreError
from kamera.window import Event, read_events, read_trace
from kamera.window.view import chrome_trace, page, record_spans


class ViewForm(str, Enum):
    """What is written: the page, a trace for Perfetto, or OpenTelemetry's spans as JSON."""

    page = "page"
    perfetto = "perfetto"
    spans = "spans"


def view(
    source: Annotated[
        str,
        typer.Argument(metavar="TRACE|URL", help="A trace, or a trace's http(s) address."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", dir_okay=False, help="The file to write (default: SOURCE's name, here)."),
    ] = None,
    what: Annotated[
        ViewForm, typer.Option("--as", help="The page, or a form for other viewers.")
    ] = ViewForm.page,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine; it goes on as the trace grows.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --live; 0 takes a free one.")] = 8765,
    quiet: Quiet = False,
) -> None:
    """Show a window's life: every chunk over time, what ran, and what a prefix cache would have run.

    The page is one file that loads nothing from elsewhere. A trace has ids, numbers and times; with
    Trace(FILE, content=True) it has texts and pictures, too.
    """
    name = title or re.split(r"[/\\?#]", source.rstrip("/"))[-1]
    if live:
        path = Path(source)
        if not path.is_file() or what is not ViewForm.page or output is not None:
            raise typer.BadParameter("--live serves the page of a trace's file, and writes nothing")
        try:
            from kamera.cli.view_live import serve_live
        except ImportError:
            raise ValueError("--live needs a web server: pip install 'kamera[serve]'") from None
        return serve_live(path, name, port, Output(quiet=quiet))
    events = _events(source)
    if what is ViewForm.page:
        text, ending = page(events, title=name), ".html"
    elif what is ViewForm.perfetto:
        text, ending = json.dumps(chrome_trace(events), separators=(",", ":")), ".perfetto.json"
    else:
        text, ending = _spans(events), ".spans.json"
    path = output or Path(f"{Path(re.split(r'[/?#]', source.rstrip('/'))[-1]).stem or 'window'}{ending}")
    path.write_text(text, encoding="utf-8")
    Output(quiet=quiet).note(f"{len(events)} operations")
    print(path)


def _events(source: str) -> Sequence[Event]:
    if re.match(r"https?://", source):
        try:
            with urlopen(source, timeout=60) as answer:
                return list(read_events(answer.read(), source))
        except URLError as error:
            raise StoreError(f"{source} does not answer ({error.reason}): give a trace's address") from None
    path = Path(source)
    if not path.is_file():
        raise StoreError(f"no file is at {source!r}: give a trace, or its address")
    return list(read_trace(path))


def _spans(events: Sequence[Event]) -> str:
    """The spans as lines of JSON, by OpenTelemetry's own exporter."""
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError:
        raise ValueError("spans need OpenTelemetry's SDK: pip install 'kamera[telemetry]'") from None
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record_spans(events, provider)
    return "".join(span.to_json(indent=None) + "\n" for span in exporter.get_finished_spans())
