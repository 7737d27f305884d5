"""A run's folder: its settings, its samples, and one JSON line per item and arm.

``run.json`` holds the format, the settings (which a resumed run must share) and the last request;
``samples.jsonl`` the data for scores and predictions, so that neither data set nor model is needed again;
``items.jsonl`` the answers (`kamera.eval.trial.Trial`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kamera import files
from kamera.errors import TaskDataError
from kamera.eval.arms import REPREFILL, Maker
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.sample import Record, TaskSample, digest, parse_record
from kamera.eval.tasks.set_files import read_json
from kamera.eval.trial import Trial

FORM = 6
"""Format of the files. A run of another format is refused."""

HEADER, SAMPLES, LINES = "run.json", "samples.jsonl", "items.jsonl"


@dataclass(frozen=True)
class SampleRow:
    """A sample in the journal, without its parts. ``at`` orders the rows of all shards."""

    at: int
    digest: str
    sample: TaskSample

    @classmethod
    def of(cls, sample: TaskSample, at: int) -> SampleRow:
        return cls(at, digest(sample), replace(sample, parts=(), others=(), before=()))


class Journal:
    """Answers by (sample id, arm), and files to which they are appended."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        resume: bool = True,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin or resume a run in ``folder``; call inside `lock_run`.

        ``asked`` is recorded, and may differ between runs. A damaged last line (of a killed run) is dropped.
        Raises ValueError if ``resume`` is off and there is a run, TaskDataError if it has other
        ``settings``, another format, or is damaged.
        """
        self.path = folder / LINES
        self.trials: dict[tuple[str, str], Trial] = {}
        self.rows: dict[str, SampleRow] = {}
        self._samples = folder / SAMPLES
        kept = folder / HEADER
        if kept.is_file():
            if not resume:
                raise ValueError(f"{str(folder)!r} already holds a run: give another folder, or resume it")
            check_same(folder, read_header(folder)["settings"], settings)
            for trial in _read_lines(self.path, Trial):
                self.trials[trial.item, trial.arm] = trial
            for row in _read_lines(self._samples, SampleRow):
                self.rows[row.sample.id] = row
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # of a run that was killed before it had a header
            self._samples.unlink(missing_ok=True)
        header = {"form": FORM, "settings": settings, "asked": dict(asked or {})}
        with files.publish_file(kept, 0o666) as file:
            file.write(json.dumps(header, indent=2).encode() + b"\n")

    def missing(self, sample: TaskSample, arms: Mapping[str, Maker]) -> dict[str, Maker]:
        """Arms without an answer. Raises TaskDataError if another version of the sample was answered."""
        row = self.rows.get(sample.id)
        if row is not None and row.digest != digest(sample):
            raise TaskDataError(
                f"{sample.where}: {sample.id} is not the sample answered in {self.path} (its prompt, "
                "images or label changed): give another folder"
            )
        known = {arm: self.trials.get((sample.id, arm)) for arm in arms}
        return {arm: arms[arm] for arm, trial in known.items() if trial is None or trial.error}

    def first_token(self, id: str) -> FirstToken | None:
        """The reference's first token of a sample; None if it was not asked."""
        trial = self.trials.get((id, REPREFILL))
        return trial.first_token if trial is not None else None

    def add(self, trial: Trial) -> None:
        """Append an answer; it is written to the operating system when this returns."""
        _append(self.path, asdict(trial))
        self.trials[trial.item, trial.arm] = trial

    def add_row(self, row: SampleRow) -> None:
        """Append a sample, unless it is in the journal already."""
        if row.sample.id not in self.rows:
            _append(self._samples, asdict(row))
            self.rows[row.sample.id] = row


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder, created if missing. Raises TaskDataError, naming the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(files.lock_path(folder, seconds=0.0))
        except TimeoutError as error:
            raise TaskDataError(
                f"{folder} is being written by another run ({str(error).partition(' by ')[2]}): give each "
                "run a folder of its own and join them with kamera eval merge"
            ) from None
        yield


def read_header(folder: Path) -> dict[str, Any]:
    """``run.json``. Raises TaskDataError for a folder without a run, a damaged one, and another format."""
    kept = folder / HEADER
    if not kept.exists():
        raise TaskDataError(f"{folder} holds no run: no {HEADER} in it")
    header: dict[str, Any] = read_json(kept, dict, "give another folder")
    if header.get("form") != FORM:
        raise TaskDataError(f"{kept} is no run of format {FORM}: give another folder")
    return header


def check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise TaskDataError if two runs differ in a setting, naming the first."""
    for key in dict.fromkeys([*now, *before]):
        # after JSON: tuples are lists
        if json.loads(json.dumps(now.get(key))) != before.get(key):
            raise TaskDataError(
                f"{folder} was run with {key} {before.get(key)!r}, not {now.get(key)!r}: "
                "give another folder, or the same settings"
            )


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def _read_lines(path: Path, kind: type[Record]) -> list[Record]:
    """The records of a file; an incomplete last one is removed from the file."""
    rows = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    records: list[Record] = []
    for number, row in enumerate(rows, 1):
        try:
            if not row.endswith(b"\n"):
                raise ValueError("a line without an end")
            records.append(parse_record(json.loads(row), kind))
        except ValueError:
            if number < len(rows):
                raise TaskDataError(f"{path}:{number}: damaged line: remove it, its item is redone") from None
            with path.open("r+b") as stream:
                stream.truncate(sum(map(len, rows[:-1])))
    return records
