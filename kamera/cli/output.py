"""Results to stdout or a file, as tables or as one JSON document; progress and notes to stderr."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from kamera.cli.options import File, Form, Format, Quiet

_PLAIN_WIDTH = 200
_UNBROKEN = 24  # cells up to this long are never folded


LINE_SECONDS = 10.0
"""Between two lines of progress within one step, where no bar can be drawn."""


class _Lines(tqdm):  # type: ignore[type-arg]
    """A progress bar for a pipe or a log: a line for each new step, and one now and then within a step."""

    _told = ""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write the line, unless nothing has begun or it is that of the end."""
        if msg != "" and (self.n or self.desc):
            of = "" if self.total is None else f" of {self.total}"
            step = self.desc.removesuffix(": ")
            line = f"{self.n}{of} {self.unit}s{', ' if step else ''}{step}"
            if line != self._told:
                print(line, file=sys.stderr, flush=True)
                self._told = line
        return True

    def close(self) -> None:
        """End without a word: the result says that it is over."""
        self.fp = io.StringIO()  # tqdm ends a bar's line
        super().close()


@dataclass(frozen=True)
class Output:
    """Output of a verb, from its ``--format``, ``--output`` and ``--quiet``."""

    format: Form = Format.table
    output: File = None
    quiet: Quiet = False

    @property
    def shows_progress(self) -> bool:
        """True if stderr is a terminal, unless ``quiet``."""
        return not self.quiet and sys.stderr.isatty()

    def write(self, document: Mapping[str, Any], tables: Iterable[Table | str]) -> None:
        """Write the result: ``document`` as JSON, or ``tables`` for people."""
        if self.format is Format.json:
            self._put(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        elif self.output is None:
            # a pipe has no width: folded lines would hide matches from grep
            _print(Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH), tables)
        else:
            text = io.StringIO()
            _print(Console(file=text, width=_PLAIN_WIDTH), tables)
            self._put(text.getvalue())

    def note(self, text: str) -> None:
        """Write a remark to stderr, unless ``quiet``."""
        if not self.quiet:
            print(text, file=sys.stderr)

    def progress(self, total: int | None, unit: str) -> tqdm[Any]:
        """A progress bar (``total`` None: a count); lines where stderr is no terminal, none if quiet."""
        if self.quiet or sys.stderr.isatty():
            return tqdm(total=total, unit=unit, file=sys.stderr, disable=self.quiet)
        return _Lines(total=total, unit=unit, file=sys.stderr, mininterval=LINE_SECONDS, leave=False)

    def report(self, title: str, done: Any, about: Mapping[str, Any], **labels: str) -> None:
        """Write a dataclass: after ``about`` as the document, as a `summary` for people."""
        rows, lines = summary(done, labels)
        self.write({**about, **asdict(done)}, [facts(title, rows), *lines])

    @contextmanager
    def counted(self, unit: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar as a function of the number done and the total."""
        with self.progress(None, unit) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show

    def _put(self, text: str) -> None:
        if self.output is None:
            sys.stdout.write(text)
        else:
            self.output.write_text(text, encoding="utf-8")
            self.note(f"wrote {self.output}")


def facts(title: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A two-column table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    return table


def summary(done: Any, labels: Mapping[str, str]) -> tuple[list[tuple[str, object]], list[str]]:
    """Rows and lines of a dataclass of counts: fields under their own names or their ``labels``.

    Of a tuple the row is how many there are, and texts in it are lines of their own.
    """
    rows: list[tuple[str, object]] = []
    lines: list[str] = []
    for field in fields(done):
        value = getattr(done, field.name)
        label = labels.get(field.name, field.name.replace("_", " "))
        if isinstance(value, tuple):
            lines += [f"{label}: {line}" for line in value if isinstance(line, str)]
            value = len(value)
        rows.append((label, size(value) if "bytes" in field.name else value))
    return rows, lines


def listing(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of many rows; numbers are right-aligned."""
    cells = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        values = [row[i] for row in cells if row[i] is not None]
        table.add_column(
            column,
            justify="right" if values and all(isinstance(v, int | float) for v in values) else "left",
            no_wrap=all(len(str(v)) <= _UNBROKEN for v in values),
            overflow="fold",
        )
    for row in cells:
        table.add_row(*[Text("" if value is None else str(value)) for value in row])
    return table


def finite(value: Any) -> Any:
    """The value with null for nan, which JSON lacks (no gap to close, no flip to recover)."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def size(count: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _print(console: Console, tables: Iterable[Table | str]) -> None:
    for table in tables:
        if isinstance(table, str):
            console.print(Text(table), soft_wrap=True)
        else:
            console.print(table)
