"""Samples of benchmarks, problems with their files, and the interface of a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import cattrs

Record = TypeVar("Record")


@dataclass(frozen=True)
class Passage:
    """Text of the prompt, verbatim, newlines included."""

    text: str
    live: bool = False


@dataclass(frozen=True)
class Picture:
    """An image of the prompt, and the text that moves with it.

    ``source`` is a path, or a PIL image if the set has no image files.
    """

    source: Any
    live: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Video:
    """A clip of the prompt: ``num_frames`` evenly spaced frames, or frames at ``fps``, of a file.

    ``source`` is a path, or a decoded `Clip`.
    """

    source: Any
    num_frames: int | None = None
    fps: float | None = None
    live: bool = False


Part = Passage | Picture | Video


@dataclass(frozen=True)
class TaskSample:
    """One item of a benchmark.

    ``parts`` and then ``question`` are the whole prompt in the order of the benchmark's own code: the parts
    become chunks, the question is the text that ends the prompt. A ``live`` part belongs to the question or
    its choices: it arrives with the question, so it is always computed after the context, never reused.
    ``id`` is unique in a run (``"retrieval-text-val/17"``), ``task`` the subtask. ``answer`` is None if
    labels are private: then only predictions are written. ``choices`` are the options in order, empty for
    open questions. ``meta`` holds keys for grouping and fields of the prediction files. ``where`` is
    ``"file:line"``. The first ``head`` parts (an instruction) stay when an over-long prompt is cut.

    ``before`` are the windows that the context went through, as indices into ``parts`` and then ``others``,
    parts that are not in the prompt; such a context has no live parts within.
    """

    id: str
    task: str
    parts: tuple[Part, ...]
    question: str
    answer: Any
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    head: int = 0
    others: tuple[Part, ...] = ()
    before: tuple[tuple[int, ...], ...] = ()

    @property
    def prompt(self) -> str:
        """The prompt as text, with ``<image>`` and ``<video>`` for media."""
        return "".join(map(_write_part, self.parts)) + self.question


@dataclass(frozen=True)
class Problem:
    """An error in the data, with file and line.

    ``skipped`` is True if the item is left out, False for a remark on an item that runs.
    """

    where: str
    what: str
    skipped: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}{'; skipped' if self.skipped else ''}"


@dataclass(frozen=True)
class Answered:
    """A sample (the ``source`` of its media may be None), one arm's response, and its score.

    ``score`` is 0.0 to 1.0, None without a label.
    """

    sample: TaskSample
    response: str
    score: float | None


@dataclass(frozen=True)
class Cell:
    """One cell of a grouping: ``by`` names the grouping ("task", "context length"), ``label`` the cell."""

    by: str
    label: str
    score: float
    n: int


@dataclass(frozen=True)
class Summary:
    """Scores of one arm.

    ``official`` is the score by the rule of the benchmark's own tools (``how`` describes it in a few words),
    ``mean`` the plain mean over labelled samples. Both are nan if ``n``, the number of labelled samples, is
    zero.
    """

    official: float
    how: str
    mean: float
    n: int
    groups: tuple[Cell, ...] = ()

    @classmethod
    def of(
        cls, answered: Sequence[Answered], how: str, groups: Iterable[Cell], official: float | None = None
    ) -> Summary:
        """The summary of an arm's answers; ``official`` is the plain mean by default."""
        scores = [a.score for a in answered if a.score is not None]
        overall = mean(scores)
        return cls(overall if official is None else official, how, overall, len(scores), tuple(groups))


class Task:
    """A benchmark in its published layout.

    Options (split, subtasks) are arguments of its constructor. Raises ValueError for a subtask that is not
    ``offered``.
    """

    name: ClassVar[str]
    offered: ClassVar[Sequence[str]]
    overlong: ClassVar[Literal["left", "refuse"]] = "refuse"
    """Treatment of a prompt longer than the window: drop parts after the head, or answer "None"."""

    def __init__(self, subtasks: Sequence[str] | None = None) -> None:
        self.subtasks = tuple(subtasks or ())
        for name in self.subtasks:
            if name not in self.offered:
                raise ValueError(f"{self.name} has no subtask {name!r}: {', '.join(self.offered)}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options that determine prompts, as JSON values; arguments of `make_task`."""
        return {}

    def load(self, data: Path, limit: int | None = None) -> Iterator[TaskSample | Problem]:
        """Samples with their media in file order, and problems of the data; see `list_samples`."""
        for item in self.list_samples(data, limit):
            yield from [item] if isinstance(item, Problem) else self.with_media(item)

    def list_samples(self, data: Path, limit: int | None = None) -> Iterator[TaskSample | Problem]:
        """The samples of at most ``limit`` records of each annotation file, as `files` has them.

        Streams. Raises TaskDataError if nothing can be loaded at all (unknown layout).
        """
        return report_duplicates(chain.from_iterable(_first(items, limit) for items in self.files(data)))

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        """Samples and problems of each annotation file."""
        raise NotImplementedError

    def with_media(self, sample: TaskSample) -> Iterator[TaskSample | Problem]:
        """The sample with its media, if `files` did not read them; or their problem."""
        yield sample

    def max_new_tokens(self, sample: TaskSample) -> int:
        """Most tokens of an answer: 16, as in lmms-eval, where the benchmark publishes no limit."""
        return 16

    def score(self, response: str, sample: TaskSample) -> float:
        """Score from 0.0 to 1.0 by the benchmark's own scorer. Only called with a label."""
        raise NotImplementedError

    def decision(self, response: str, sample: TaskSample) -> str:
        """The scorer's reading of a response: responses with equal decisions have equal scores.

        The option if one is found, else the answer in the scorer's normal form. Needs no label.
        """
        raise NotImplementedError

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """One arm's results, in the benchmark's groups."""
        raise NotImplementedError

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """Write one arm's responses in the benchmark's own prediction format."""
        raise NotImplementedError


def report_duplicates(items: Iterable[TaskSample | Problem]) -> Iterator[TaskSample | Problem]:
    """The items; a sample with the id of an earlier one is a problem."""
    seen: set[str] = set()
    for item in items:
        if isinstance(item, TaskSample):
            if item.id in seen:
                yield Problem(item.where, f"{item.id} occurs twice")
                continue
            seen.add(item.id)
        yield item


def _first(items: Iterable[TaskSample | Problem], limit: int | None) -> Iterator[TaskSample | Problem]:
    """Items up to the ``limit``-th record that gives samples, and a remark if some have no label."""
    records: set[str] = set()
    unlabelled, where = 0, ""
    for item in items:
        if len(records) == limit and item.where not in records:
            break
        if isinstance(item, TaskSample):
            records.add(item.where)
            if item.answer is None:
                unlabelled, where = unlabelled + 1, item.where.rpartition(":")[0]
        yield item
    if unlabelled:
        yield Problem(where, f"{unlabelled} samples have private labels: predictions only", skipped=False)


def digest(sample: TaskSample) -> str:
    """Digest of everything but the model that affects an answer: prompt, media (name and size), label."""
    parts = (*sample.parts, *sample.others)
    texts = [_write_part(part) for part in sample.others]
    fields = [sample.id, sample.prompt, repr(sample.answer), [*map(_name, parts)], texts, sample.before]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:32]


def parse_record(document: Any, kind: type[Record]) -> Record:
    """The dataclass whose fields, as JSON values, are ``document``. Raises ValueError for anything else."""
    try:
        return _RECORDS.structure(document, kind)
    except (TypeError, KeyError, AttributeError, cattrs.errors.CattrsError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from None


def _part(fields: Mapping[str, Any], _: object) -> Part:
    return (Passage if "text" in fields else Picture if "caption" in fields else Video)(**fields)


_RECORDS = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
_RECORDS.register_structure_hook(Part, _part)


def _write_part(part: Part) -> str:
    if isinstance(part, Passage):
        return part.text
    return f"<image>{part.caption}" if isinstance(part, Picture) else "<video>"


def _name(part: Part) -> list[Any]:
    if isinstance(part, Passage):
        return []
    options = [] if isinstance(part, Picture) else [part.num_frames, part.fps]
    if isinstance(part.source, str | Path):
        path = Path(part.source)
        return [path.name, path.stat().st_size if path.is_file() else None, *options]
    return [type(part.source).__name__, *options]


def interleave(texts: Sequence[str], pictures: Iterable[Picture], live: bool = False) -> list[Part]:
    """Texts with a picture between each two; of empty texts only the last one stays, ``live`` ones or not."""
    parts: list[Part] = []
    for text, shown in zip(texts[:-1], pictures, strict=True):
        parts += [*[Passage(text, live)] * bool(text), shown]
    return [*parts, Passage(texts[-1], live)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def means_by(by: str, scored: Iterable[tuple[str, float]]) -> tuple[Cell, ...]:
    """Means of (label, score) pairs by label, in the order of first occurrence."""
    cells: dict[str, list[float]] = {}
    for label, score in scored:
        cells.setdefault(label, []).append(score)
    return tuple(Cell(by, label, mean(scores), len(scores)) for label, scores in cells.items())
