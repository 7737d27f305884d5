"""Run a benchmark: every arm answers every item through a real window; resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from kamera.backbones import Backbone
from kamera.errors import EmptyChunk, NotRelocatable, TaskDataError, UnreadableMedia
from kamera.eval.tasks.arms import BLIND, REFERENCE, Arm, parse_arms
from kamera.eval.tasks.asking import Asking, Reuse, room_of
from kamera.eval.tasks.journal import Journal, Line
from kamera.eval.tasks.report import Results, collect
from kamera.eval.tasks.sample import Answered, Part, Problem, Sample, Task, Text, digest

ARMS = (REFERENCE, BLIND, "patch@16")


def run_task(
    backbone: Backbone,
    task: Task,
    data: str | Path,
    out_dir: str | Path,
    *,
    arms: Sequence[str] = ARMS,
    limit: int | None = None,
    max_tokens: int | None = None,
    system: str | None = None,
    reuse: Reuse = "context",
    resume: bool = True,
    on_item: Callable[[], None] = lambda: None,
) -> Results:
    """Ask every sample of ``task`` in ``data`` under every arm, greedily, and score the answers.

    Chunks are a sample's images, clips and the text between them; the antecedents of each are what
    stands before it. Only the context is reused; the question and its choices are live, pictures and
    all, unless ``reuse`` is "all" (then only the text that ends the prompt is). Lines, predictions and
    settings are kept in ``out_dir``; a second run with the same settings answers only what is missing
    there. ``limit`` bounds the samples of each annotation file, ``max_tokens`` (default: what the model
    was made for) the prompt, ``system`` is the system prompt. ``on_item`` is called after each sample.

    Raises ValueError for an unknown arm, TaskDataError for data that is not laid out as published and
    for a folder of another run (model, arms, settings, data). What is wrong with single samples is
    in the result's ``problems``.
    """
    data, out_dir = Path(data), Path(out_dir)
    wanted = parse_arms(arms)
    if reuse not in get_args(Reuse):
        raise ValueError(f"reuse {reuse!r} is none of {', '.join(get_args(Reuse))}")
    room = room_of(backbone) if max_tokens is None else max_tokens
    settings = {
        "task": task.name,
        "arms": [arm.name for arm in wanted],
        "backbone": backbone.fingerprint,
        "system": system,
        "max_tokens": room,
        "reuse": reuse,
    }
    journal = Journal(out_dir, settings, resume)
    asking = Asking(backbone, task, wanted, system, room, reuse)
    problems: list[Problem] = []
    answered: dict[str, list[Answered]] = {arm.name: [] for arm in wanted}
    lines: list[Line] = []
    for item in _once(task.load(data, limit)):
        if isinstance(item, Problem):
            problems.append(item)
            continue
        missing = _missing(journal, item, wanted)
        try:
            held = journal.lines.get((item.id, REFERENCE))
            for line in asking.lines(item, missing, held) if missing else ():
                journal.add(line)
        except (UnreadableMedia, EmptyChunk, NotRelocatable) as error:
            problems.append(Problem(item.where, str(error)))
            continue
        kept = replace(item, parts=tuple(_without_media(part) for part in item.parts))
        for arm in wanted:
            line = journal.lines[item.id, arm.name]
            lines.append(line)
            answered[arm.name].append(Answered(kept, line.response, line.score))
        on_item()
    for name, of_arm in answered.items():
        folder = out_dir / "predictions" / name
        folder.mkdir(parents=True, exist_ok=True)
        task.write_predictions(of_arm, folder)
    return collect(task, answered, lines, problems)


def _without_media(part: Part) -> Part:
    """What predictions are written from: a long run must not keep every decoded clip."""
    return part if isinstance(part, Text) else replace(part, source=None)


def _missing(journal: Journal, sample: Sample, arms: Sequence[Arm]) -> list[Arm]:
    """Arms without a line. Raises TaskDataError when a line answers another version of the sample."""
    held = {arm: journal.lines.get((sample.id, arm.name)) for arm in arms}
    wanted = digest(sample)
    for line in held.values():
        if line is not None and line.digest != wanted:
            raise TaskDataError(
                f"{sample.where}: {sample.id} is not what {journal.path} holds answers to (its prompt, "
                "images or label changed): give another folder"
            )
    return [arm for arm, line in held.items() if line is None]


def _once(items: Iterator[Sample | Problem]) -> Iterator[Sample | Problem]:
    seen: set[str] = set()
    for item in items:
        if isinstance(item, Sample):
            if item.id in seen:
                yield Problem(item.where, f"{item.id} was there before")
                continue
            seen.add(item.id)
        yield item
