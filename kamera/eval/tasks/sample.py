"""What every benchmark is made of: samples, problems with its files, and the contract of a task."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Text:
    """Words of the prompt, exactly as they stand there, newlines included."""

    text: str
    live: bool = False


@dataclass(frozen=True)
class Picture:
    """An image of the prompt. ``source`` is a path, or a PIL image where the set holds no files."""

    source: Any
    live: bool = False


@dataclass(frozen=True)
class Video:
    """A clip of the prompt: ``num_frames`` evenly spaced frames, or frames at ``fps``, of a file.

    ``source`` is a path, or a `Clip` that is already decoded.
    """

    source: Any
    num_frames: int | None = None
    fps: float | None = None
    live: bool = False


Part = Text | Picture | Video

Wanted = Callable[[str], bool]
"""Whether the sample of an id is to be made: asked before its media are read, once each, in file order."""


def every(id: str) -> bool:
    """Wants every sample."""
    return True


@dataclass(frozen=True)
class Sample:
    """One item of a benchmark, ready to be asked.

    ``parts`` and then ``question`` are the whole prompt in the order the benchmark's own code has it:
    the parts become chunks, the question is the text that ends the prompt. A part that is ``live``
    belongs to the question or its choices too: a server meets it with the question, so it is computed
    behind the context, whatever of that is reused. ``id`` is unique in a run
    (``"retrieval-text-val/17"``), ``task`` the subtask. ``answer`` is None where labels are private:
    then only predictions are written. ``choices`` are the options in order, empty for open questions.
    ``meta`` holds what results are grouped by and what the prediction files repeat. ``where`` is
    ``"file:line"``. The first ``head`` parts (an instruction) stay when an over-long prompt is cut.
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

    @property
    def prompt(self) -> str:
        """The prompt as text, with ``<image>`` and ``<video>`` where media stand."""
        marks = {Picture: "<image>", Video: "<video>"}
        return "".join(p.text if isinstance(p, Text) else marks[type(p)] for p in self.parts) + self.question


@dataclass(frozen=True)
class Problem:
    """Something wrong with the data: named with file and line, never guessed around.

    ``skipped`` tells an item that is left out from a remark on one that runs all the same.
    """

    where: str
    what: str
    skipped: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}{'; skipped' if self.skipped else ''}"


@dataclass(frozen=True)
class Answered:
    """A sample (its media's ``source`` may be None by now), one arm's response, and what it scores.

    ``score`` is 0.0 to 1.0, None without a label.
    """

    sample: Sample
    response: str
    score: float | None


@dataclass(frozen=True)
class Group:
    """One cell of a grouping: ``by`` names the grouping ("task", "context length"), ``label`` the cell."""

    by: str
    label: str
    score: float
    n: int


@dataclass(frozen=True)
class Summary:
    """What a benchmark says of one arm.

    ``official`` is the score as the benchmark's own tools take it (``how`` says in a few words how),
    ``mean`` the plain mean over labelled samples. Both are nan where ``n``, the number of labelled
    samples, is zero.
    """

    official: float
    how: str
    mean: float
    n: int
    groups: tuple[Group, ...] = ()


class Task(Protocol):
    """A benchmark in its published layout. Options (split, subtasks) are given when it is made."""

    name: str
    overlong: Literal["left", "refuse"]
    """A prompt longer than the window: drop parts from the left behind the head, or answer "None"."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options that decide what a prompt looks like, as JSON has them; `make_task` takes them."""
        ...

    def load(
        self, data: Path, limit: int | None = None, wanted: Wanted = every
    ) -> Iterator[Sample | Problem]:
        """Samples in file order, at most ``limit`` of each annotation file, of these the ``wanted``, and
        what is wrong with them.

        Streams. Raises TaskDataError where nothing can be loaded at all (no such layout).
        """
        ...

    def max_new_tokens(self, sample: Sample) -> int:
        """How long an answer may be."""
        ...

    def score(self, response: str, sample: Sample) -> float:
        """0.0 to 1.0, as the benchmark's own scorer gives it. Only called with a label."""
        ...

    def decision(self, response: str, sample: Sample) -> str:
        """What the scorer reads in a response: two responses of one decision always score alike.

        The option where one is found, else the answer in the scorer's normal form. Needs no label.
        """
        ...

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """One arm's results, grouped as the benchmark groups them."""
        ...

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> list[Path]:
        """Write one arm's responses in the benchmark's own prediction format; the files written."""
        ...


def digest(sample: Sample) -> str:
    """What an answer depends on besides the model: prompt, media (name and size), label."""
    said = [sample.id, sample.prompt, repr(sample.answer), [_name(part) for part in sample.parts]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _name(part: Part) -> list[Any]:
    if isinstance(part, Text):
        return []
    options = [] if isinstance(part, Picture) else [part.num_frames, part.fps]
    if isinstance(part.source, str | Path):
        path = Path(part.source)
        return [path.name, path.stat().st_size if path.is_file() else None, *options]
    return [type(part.source).__name__, *options]


def mean(values: Sequence[float]) -> float:
    """The plain mean, nan of nothing."""
    return sum(values) / len(values) if values else float("nan")


def grouped(by: str, scored: Iterable[tuple[str, float]]) -> tuple[Group, ...]:
    """Means of (label, score) pairs by label, in the order labels first come."""
    cells: dict[str, list[float]] = {}
    for label, score in scored:
        cells.setdefault(label, []).append(score)
    return tuple(Group(by, label, mean(scores), len(scores)) for label, scores in cells.items())
