"""Submissions: answers of any system to a frozen benchmark, as one JSON document of a published schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.arms import EXACT
from kamera.eval.reuse.frozen import Benchmark
from kamera.eval.trial import Trial

FORMAT, VERSION = "kamera-reuse-submission", 1
Key = tuple[str, str, str]
"""Item, trace and arm."""


@dataclass(frozen=True)
class Submission:
    """Answers of a system's arms, and which of them were prepared in advance."""

    benchmark: str
    system: Mapping[str, Any]
    arms: Mapping[str, bool]
    lines: tuple[Trial, ...]

    def document(self) -> dict[str, Any]:
        """What the schema describes."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "benchmark": self.benchmark,
            "system": dict(self.system),
            "arms": [{"name": name, "rehearsed": rehearsed} for name, rehearsed in self.arms.items()],
            "lines": [_line(trial) for trial in self.lines],
        }

    def answered(self) -> dict[Key, Trial]:
        """Lines by item, trace and arm."""
        return {(line.item, line.trace, line.arm): line for line in self.lines}


def _line(trial: Trial) -> dict[str, Any]:
    """The fields of the schema."""
    if trial.error:
        return {"item": trial.item, "trace": trial.trace, "arm": trial.arm, "error": trial.error}
    fields = schema()["properties"]["lines"]["items"]["properties"]
    return {name: value for name, value in asdict(trial).items() if name in fields and name != "error"}


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a submission."""
    text = Path(__file__).with_name("submission.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def read_submission(path: Path, benchmark: Benchmark) -> Submission:
    """A submission to ``benchmark``, checked against the schema and against the benchmark.

    Raises TaskDataError for a document that breaks the schema (the place and the rule in one line), for
    another benchmark, and for lines that are missing, double, or about unknown items, traces or arms.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TaskDataError(f"{path}: not readable ({error}): give a submission's JSON file") from None
    _validate(document, path)
    if document["benchmark"] != benchmark.digest:
        raise TaskDataError(
            f"{path}: answers benchmark {document['benchmark'][:12]}, this is {benchmark.digest[:12]}: give "
            "that one's folder"
        )
    made = Submission(
        document["benchmark"],
        document["system"],
        {arm["name"]: arm["rehearsed"] for arm in document["arms"]},
        tuple(Trial.of(line) for line in document["lines"]),
    )
    _complete(made, benchmark, path)
    return made


def _validate(document: Any, path: Path) -> None:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match
    except ImportError:
        raise TaskDataError("checking a submission needs jsonschema: pip install 'kamera[eval]'") from None
    error = best_match(Draft202012Validator(schema()).iter_errors(document))
    if error is not None:
        told = error.message if len(error.message) < 200 else f"{error.message[:200]} …"
        raise TaskDataError(f"{path}: {error.json_path}: {told}")


def _complete(made: Submission, benchmark: Benchmark, path: Path) -> None:
    answered = made.answered()
    if len(answered) < len(made.lines):
        raise TaskDataError(f"{path}: an item, trace and arm are answered twice")
    asked = {item.id for item in benchmark.items if any(line.item == item.id for line in made.lines)}
    wanted = {
        (item.id, trace.name, arm)
        for item in benchmark.items
        if item.id in asked
        for trace in item.traces
        for arm in made.arms
    }
    if foreign := sorted(answered.keys() - wanted):
        raise TaskDataError(f"{path}: {' / '.join(foreign[0])} is not asked in this benchmark")
    if missing := sorted(wanted - answered.keys()):
        raise TaskDataError(
            f"{path}: {len(missing)} of {len(wanted)} lines are missing, first {' / '.join(missing[0])}"
        )
    for (item, trace, arm), line in answered.items():
        exact = answered[item, trace, EXACT]
        if line.first_token and exact.first_token and line.first_token.ids != exact.first_token.ids:
            raise TaskDataError(f"{path}: {item} / {trace} / {arm} lists other first tokens than {EXACT}")
