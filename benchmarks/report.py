"""One command, one table: the options that every benchmark has, and how its rows are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances
from kamera.cli.output import Output, listing

Row = Mapping[str, Any]
"""A line of a table by column: a number, a text, or a pair or triple of numbers (median, low, high)."""


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The options of ``python -m benchmarks.NAME``; ``about`` is its module's docstring."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--format", choices=("table", "json"), default="table")
    made.add_argument("--output", type=Path, help="write there instead of to stdout")
    return made


def tell(options: argparse.Namespace, title: str, rows: Sequence[Row], **facts: Any) -> None:
    """Show the rows as one table or one JSON document, with the command, the commit and the machine.

    ``facts`` are further entries of the document.
    """
    document = {"command": _command(), **circumstances(getattr(options, "device", "cpu")), **facts}
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_shown(row.get(name)) for name in columns] for row in rows]
    head = f"{document['command']}\ncommit {document['commit']}, {document['processor']}"
    table = listing(f"\n{title}", columns, cells)
    Output(options.format, options.output).write(
        {**document, "rows": [dict(row) for row in rows]}, [head, table]
    )


def progress(text: str) -> None:
    """One line to stderr."""
    print(text, file=sys.stderr, flush=True)


def _command() -> str:
    if sys.argv[0].endswith("__main__.py"):
        folder = Path(sys.argv[0]).resolve().parent
        return " ".join(["python -m", ".".join(folder.parts[-2:]), *sys.argv[1:]])
    return "called from Python"


def _shown(cell: Any) -> str:
    """A cell for people: four digits of a float, a median with its bounds, a dash for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, tuple):
        first, *rest = map(_shown, cell)
        return f"{first} ({'–'.join(rest)})"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
