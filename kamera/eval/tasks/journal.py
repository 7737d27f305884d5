"""A run's folder: what it was run with, and one JSON line per item and arm, so that it can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError

HEADER, LINES = "run.json", "items.jsonl"


@dataclass(frozen=True)
class Line:
    """One arm's answer to one sample.

    ``digest`` is that of the sample as it was asked, ``score`` None without a label. ``tokens`` are
    those of the chunks and the question: ``reused_tokens`` came from the store, ``live_tokens`` were
    computed for this answer. ``note`` is empty, "cut" (parts dropped from the left),
    "over-length" or "out of memory" (both answered "None"). ``first_token`` is the re-prefill's (its
    `FirstToken` as a dict), ``first_token_kl`` how far the arm's lies from it; None without a re-prefill.
    """

    id: str
    arm: str
    digest: str
    response: str
    score: float | None
    tokens: int = 0
    seconds: float = 0.0
    answer_seconds: float = 0.0
    forwards: int = 0
    tokens_recomputed: int = 0
    reused_tokens: int = 0
    live_tokens: int = 0
    bytes: int = 0
    kv_bytes: int = 0
    note: str = ""
    first_token_kl: float | None = None
    first_token: dict[str, Any] | None = None


class Journal:
    """Lines kept so far, by (sample id, arm), and a file that grows by one line at a time."""

    def __init__(self, folder: Path, header: dict[str, Any], resume: bool = True) -> None:
        """Begin a run in ``folder``, or go on with the one that is there.

        A damaged last line (a run that was killed) is dropped. Raises ValueError when ``resume`` is
        off and there is a run, TaskDataError when it was run with another ``header`` or is damaged.
        """
        self.path = folder / LINES
        self.lines: dict[tuple[str, str], Line] = {}
        kept = folder / HEADER
        if kept.is_file():
            if not resume:
                raise ValueError(f"{str(folder)!r} already holds a run: give another folder, or resume it")
            _check_same(kept, header)
            self._read()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # of a run that died before it had a header
            kept.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")

    def add(self, line: Line) -> None:
        """Keep a line; it is on its way to the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")
        self.lines[line.id, line.arm] = line

    def _read(self) -> None:
        if not self.path.is_file():
            return
        data = self.path.read_bytes()
        rows = data.split(b"\n")
        whole = 0
        for number, row in enumerate(rows, 1):
            line = _line(row)
            if line is None and any(rows[number:]):
                raise TaskDataError(f"{self.path}:{number}: damaged line: remove it, its item is redone")
            if line is None or number == len(rows):
                break
            self.lines[line.id, line.arm] = line
            whole += len(row) + 1
        if whole < len(data):
            with self.path.open("r+b") as stream:
                stream.truncate(whole)


def _line(row: bytes) -> Line | None:
    try:
        return Line(**json.loads(row))
    except (ValueError, TypeError):
        return None


def _check_same(kept: Path, header: dict[str, Any]) -> None:
    try:
        before = json.loads(kept.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TaskDataError(f"{kept} is damaged ({error}): give another folder") from None
    for key in sorted(set(header) | set(before)):
        if before.get(key) != header.get(key):
            raise TaskDataError(
                f"{kept.parent} was run with {key} {before.get(key)!r}, not {header.get(key)!r}: "
                "give another folder, or the same settings"
            )
