"""Run a benchmark: every arm answers every item through a `KameraWindow`; resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from kamera.engines.hf import Backbone
from kamera.errors import TaskDataError
from kamera.eval.adapter import Maker
from kamera.eval.tasks.arms import BLIND, REFERENCE, Arm, parse_arms
from kamera.eval.tasks.asking import Asking, Reuse, room_of
from kamera.eval.tasks.journal import Journal, Row, locked
from kamera.eval.tasks.report import Results, collect
from kamera.eval.tasks.sample import Answered, Problem, Sample, Task, digest
from kamera.eval.tasks.selection import Chooser, Selection
from kamera.eval.tasks.shrink import Shrink
from kamera.window import library_versions

ARMS = (REFERENCE, BLIND, "patch@16")


def run_task(
    backbone: Backbone,
    task: Task,
    data: str | Path,
    out_dir: str | Path,
    *,
    arms: Sequence[str] = ARMS,
    others: Mapping[str, Maker] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] | None = None,
    max_tokens: int | None = None,
    system: str | None = None,
    reuse: Reuse = "context",
    max_pixels: int | None = None,
    image_size: int | None = None,
    resume: bool = True,
    on_item: Callable[[], None] = lambda: None,
) -> Results:
    """Ask samples of ``task`` in ``data`` under every arm, greedily, and score the answers.

    ``others`` are arms of other modules by name (`kamera.eval.adapter.arms_of`).

    Chunks are a sample's images, clips and the text between them. Only the context is reused; the question
    and its choices with their pictures are live, unless ``reuse`` is "all" (then only the text that ends the
    prompt is live).

    ``limit``, ``sample``, ``seed`` and ``shard`` select the samples (`Selection`; default: all).
    ``max_tokens`` (default: the model's limit) bounds the prompt, ``system`` is the system prompt,
    ``max_pixels`` and ``image_size`` make pictures and frames smaller (`Shrink`) for every arm. ``on_item``
    is called after each sample.

    Lines, predictions and settings are kept in ``out_dir``; a second run there answers only missing items:
    other samples, new arms, failed items. A sample that fails is a line with its error and one of the
    result's ``problems``; the results cover the others. Raises ValueError for an unknown arm, TaskDataError
    for data in an unknown layout, for a folder of another run (model, settings, versions, data) and for one
    that another process is writing.
    """
    data, out_dir = Path(data), Path(out_dir)
    wanted = parse_arms(arms, others)
    if reuse not in get_args(Reuse):
        raise ValueError(f"reuse {reuse!r} is none of {', '.join(get_args(Reuse))}")
    shrink = Shrink(max_pixels, image_size)
    selection = Selection(limit, sample, seed, shard)
    limit_tokens = room_of(backbone) if max_tokens is None else max_tokens
    seams = backbone.seams(system)
    settings = {
        "task": task.name,
        "options": dict(task.settings),
        "backbone": backbone.fingerprint,
        "system": system,
        "prompt": {"opening": seams.prefix, "closing": seams.tail},
        "max_tokens": limit_tokens,
        "reuse": reuse,
        "pictures": asdict(shrink),
        "versions": library_versions(),
    }
    asked = {"data": str(data), "arms": [arm.name for arm in wanted], **selection.document()}
    with locked(out_dir):
        journal = Journal(out_dir, settings, resume, asked)
        asking = Asking(backbone, task, system, limit_tokens, reuse, shrink)
        chooser = Chooser(selection, task, data)
        problems: list[Problem] = []
        ids: list[str] = []
        for item in _once(task.load(data, limit, chooser.wanted)):
            if isinstance(item, Problem):
                problems.append(item)
                continue
            missing = _missing(journal, item, wanted)
            journal.add_row(Row.of(item, chooser.places[item.id]))
            held = journal.lines.get((item.id, REFERENCE))
            for line in asking.lines(item, missing, held) if missing else ():
                journal.add(line)
            ids.append(item.id)
            on_item()
        return finish(task, journal, ids, [arm.name for arm in wanted], out_dir, problems)


def finish(
    task: Task,
    journal: Journal,
    ids: Iterable[str],
    arms: Sequence[str],
    out_dir: Path,
    problems: Sequence[Problem] = (),
) -> Results:
    """Predictions and results of the samples that every arm answered; the others become problems."""
    answered: dict[str, list[Answered]] = {arm: [] for arm in arms}
    lines, found = [], list(problems)
    for id in ids:
        row, held = journal.rows[id], {arm: journal.lines.get((id, arm)) for arm in arms}
        lacking = [arm for arm, line in held.items() if line is None]
        failed = [f"{arm}: {line.error}" for arm, line in held.items() if line is not None and line.error]
        if failed or lacking:
            found.append(
                Problem(row.where, failed[0] if failed else f"{id} was not asked under {lacking[0]}")
            )
            continue
        for arm, line in held.items():
            assert line is not None
            lines.append(line)
            answered[arm].append(Answered(row.sample, line.response, line.score))
    for name, of_arm in answered.items():
        folder = out_dir / "predictions" / name
        folder.mkdir(parents=True, exist_ok=True)
        task.write_predictions(of_arm, folder)
    return collect(task, answered, lines, found)


def _missing(journal: Journal, sample: Sample, arms: Sequence[Arm]) -> list[Arm]:
    """Arms without an answer. Raises TaskDataError if a line answers another version of the sample."""
    wanted = digest(sample)
    row = journal.rows.get(sample.id)
    if row is not None and row.digest != wanted:
        raise TaskDataError(
            f"{sample.where}: {sample.id} is not the sample answered in {journal.path} (its prompt, "
            "images or label changed): give another folder"
        )
    held = {arm: journal.lines.get((sample.id, arm.name)) for arm in arms}
    return [arm for arm, line in held.items() if line is None or line.error]


def _once(items: Iterator[Sample | Problem]) -> Iterator[Sample | Problem]:
    seen: set[str] = set()
    for item in items:
        if isinstance(item, Sample):
            if item.id in seen:
                yield Problem(item.where, f"{item.id} occurs twice")
                continue
            seen.add(item.id)
        yield item
