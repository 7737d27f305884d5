"""Results to stdout or a file, as tables or as one JSON document; progress and notes to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import reduce
from operator import getitem
from types import MappingProxyType
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from kamera.cli.options import File, Form, Quiet

_PLAIN_WIDTH = 200
_UNBOUNDED = 10_000
_FEW = 4  # items of a list are cell in a cell
_UNBROKEN = 24  # cells up to this long are never folded
_MOMENTS = ("created", "expires", "when")
_DIGEST = re.compile(r"[0-9a-f]{40,}")

Columns = Mapping[str, Sequence[str]]
Item = TypeVar("Item")

LINE_SECONDS = 10.0
"""Between two lines of progress within one step, where no bar can be drawn."""


class _Lines(tqdm):  # type: ignore[type-arg]
    """A progress bar for a pipe or a log: a line for each new step, and one now and then within a step."""

    _last_line = ""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write the line, unless nothing has begun or it is that of the end."""
        if msg != "" and (self.n or self.desc):
            of = "" if self.total is None else f" of {self.total}"
            step = self.desc.removesuffix(": ")
            line = f"{self.n}{of} {self.unit}s{', ' if step else ''}{step}"
            if line != self._last_line:
                print(line, file=sys.stderr, flush=True)
                self._last_line = line
        return True

    def close(self) -> None:
        """End without a word: the result says that it is over."""
        self.fp = io.StringIO()  # tqdm ends a bar's line
        super().close()


@dataclass(frozen=True)
class Output:
    """Output of a verb, from its ``--format``, ``--output`` and ``--quiet``."""

    format: Form = "table"
    output: File = None
    quiet: Quiet = False

    @property
    def shows_progress(self) -> bool:
        """True if stderr is a terminal, unless ``quiet``."""
        return not self.quiet and sys.stderr.isatty()

    def write(self, document: Mapping[str, Any], tables: Iterable[Table | str]) -> None:
        """Write the result: ``document`` as JSON, or ``tables`` for people."""
        if self.format == "json":
            self._put(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        elif self.output is None:
            # a pipe has no width: folded lines would hide matches from grep
            print_tables(Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH), tables)
        else:
            text = io.StringIO()
            print_tables(Console(file=text, width=_PLAIN_WIDTH), tables)
            self._put(text.getvalue())

    @contextlib.contextmanager
    def lines(self) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
        """A function that writes a result line by line, as it comes: as text, or as an object of JSON."""
        with contextlib.ExitStack() as files:
            file = sys.stdout
            if self.output is not None:
                file = files.enter_context(self.output.open("w", encoding="utf-8"))

            def write(line: str, document: Mapping[str, Any]) -> None:
                text = line if self.format == "table" else json.dumps(document, ensure_ascii=False)
                print(text, file=file, flush=True)

            yield write

    def note(self, text: str) -> None:
        """Write a remark to stderr, unless ``quiet``."""
        if not self.quiet:
            print(text, file=sys.stderr)

    def progress(self, total: int | None, unit: str) -> tqdm[Any]:
        """A progress bar (``total`` None: a count); lines where stderr is no terminal, none if quiet."""
        if self.quiet or sys.stderr.isatty():
            return tqdm(total=total, unit=unit, file=sys.stderr, disable=self.quiet)
        return _Lines(total=total, unit=unit, file=sys.stderr, mininterval=LINE_SECONDS, leave=False)

    def track(self, items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
        """The items, of which a progress bar tells how many of ``total`` are done."""
        with self.progress(total, unit) as bar:
            for item in items:
                yield item
                bar.update()

    def show(self, document: Mapping[str, Any], columns: Columns = MappingProxyType({})) -> None:
        """Write the result; for people its entries become `tables`."""
        self.write(document, tables(document, columns))

    @contextlib.contextmanager
    def progress_callback(self, unit: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar as a function of the number done and the total."""
        with self.progress(None, unit) as bar:

            def show(count: int, total: int) -> None:
                bar.total = total
                bar.update(count - bar.n)

            yield show

    def _put(self, text: str) -> None:
        if self.output is None:
            sys.stdout.write(text)
        else:
            self.output.write_text(text, encoding="utf-8")
            self.note(f"wrote {self.output}")


def facts_table(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A two-column table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    return table


def tables(document: Mapping[str, Any], columns: Columns = MappingProxyType({})) -> Iterator[Table | str]:
    """A document for people: a row for each entry, a table for a list of objects, a line for each other item.

    ``columns`` are those cell of the objects of a list, by its name (else all of them); ``a.b`` is an entry
    ``b`` of an object ``a``.
    """
    rows: list[tuple[str, object]] = []
    lists: dict[str, list[Any]] = {}
    for name, value in document.items():
        label = name.replace("_", " ")
        if isinstance(value, list | tuple) and all(isinstance(item, str | Mapping) for item in value):
            rows.append((label, len(value)))
            lists[name] = list(value)
        elif isinstance(value, Mapping):
            parts = value.items() if all(isinstance(v, Mapping) for v in value.values()) else [("", value)]
            rows += [(f"{label} {part}".strip(), _phrase(inner)) for part, inner in parts]
        else:
            whole = value is None or isinstance(value, str)
            rows.append((label, value or "none" if whole else cell(name, value)))
    yield facts_table("", rows)
    for name, items in lists.items():
        label = name.replace("_", " ")
        if items and all(isinstance(item, Mapping) for item in items):
            keys = columns.get(name) or tuple(items[0])
            heads = [key.split(".")[-1].replace("_", " ") for key in keys]
            cells = [[cell(key, reduce(getitem, key.split("."), item)) for key in keys] for item in items]
            yield listing(f"\n{label}", heads, cells)
        else:
            yield from (f"{label}: {item}" for item in items)


def cell(name: str, value: Any) -> Any:
    """An entry for people: bytes and times with their units, digests by their first digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in _MOMENTS and isinstance(value, float):
        return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    if "bytes" in name and isinstance(value, int):
        return format_size(value)
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value[:12]
    if isinstance(value, list | tuple):
        few = len(value) <= _FEW
        return " ".join(str(cell("", inner)) for inner in value) if few else f"{len(value)} in all"
    return f"{value:.3g}" if isinstance(value, float) else value


def _phrase(value: Mapping[str, Any]) -> str:
    """Entries in one line, counts before their names: ``3 objects, 1.5 MiB, minimum patched``."""
    parts = []
    for name, inner in value.items():
        text, label = str(cell(name, inner)), name.replace("_", " ")
        is_count = isinstance(inner, int) and not isinstance(inner, bool)
        if inner is not None and text:
            parts.append(text if name == "bytes" else f"{text} {label}" if is_count else f"{label} {text}")
    return ", ".join(parts)


def listing(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of many rows, without the columns that are empty in all of them; numbers are right-aligned."""
    grid = [list(row) for row in rows]
    places = [i for i in range(len(columns)) if not grid or any(row[i] not in (None, "") for row in grid)]
    cells = [[row[i] for i in places] for row in grid]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns[place] for place in places):
        values = [row[i] for row in cells if row[i] is not None]
        longest = max(len(str(value)) for value in (column, *values))
        table.add_column(
            column,
            justify="right" if values and all(isinstance(v, int | float) for v in values) else "left",
            min_width=longest if longest <= _UNBROKEN else None,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*[Text("" if value is None else str(value)) for value in row])
    return table


def nan_to_null(value: Any) -> Any:
    """The value with null for nan, which JSON lacks (no gap to close, no flip to recover)."""
    if isinstance(value, dict):
        return {k: nan_to_null(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_null(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def format_size(count: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_tables(console: Console, tables: Iterable[Table | str]) -> None:
    """Print tables and lines; what a terminal is too narrow for is left out, and named."""
    for table in tables:
        if isinstance(table, str):
            console.print(Text(table), soft_wrap=True)
            continue
        left_out: list[str] = []
        while len(table.columns) > 1 and _width(console, table) > console.width:
            left_out.insert(0, str(table.columns.pop().header))
        console.print(table)
        if left_out:  # half an id is of no use: cells are whole, and what is missing has a name
            console.print(f"too wide for this terminal: {', '.join(left_out)}; see --format json")


def _width(console: Console, table: Table) -> int:
    """Columns of a terminal that a table takes if no word in it is broken."""
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).minimum
