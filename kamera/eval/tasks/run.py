"""Run a benchmark: every arm answers every item through a `KameraWindow`; resumable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from kamera import __version__
from kamera.engines.hf import Backbone, HfEngine
from kamera.eval.arms import BLIND, REPREFILL, Maker, arms_named
from kamera.eval.tasks.asking import ReusedPart, TaskAsker, room_of
from kamera.eval.tasks.journal import Journal, SampleRow, lock_run
from kamera.eval.tasks.report import Results, results_of_run
from kamera.eval.tasks.sample import Answered, Problem, Task
from kamera.eval.tasks.selection import Selection, select
from kamera.eval.tasks.shrink import Shrink

ARMS = (REPREFILL, BLIND, "patch@16")


def run_task(
    backbone: Backbone | HfEngine,
    task: Task,
    data: str | Path,
    out_dir: str | Path,
    *,
    arms: Sequence[str] = ARMS,
    others: Mapping[str, Maker] | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    shard: str = "1/1",
    max_tokens: int | None = None,
    system: str | None = None,
    reuse: ReusedPart = "context",
    max_pixels: int | None = None,
    image_size: int | None = None,
    resume: bool = True,
    bar: tqdm[Any] | None = None,
) -> Results:
    """Ask samples of ``task`` in ``data`` under every arm, greedily, and score the answers.

    ``others`` are arms of other modules by name (`kamera.eval.arms.arms_of`).

    Chunks are a sample's images, clips and the text between them. Only the context is reused; the question
    and its choices with their pictures are live, unless ``reuse`` is "all" (then only the text that ends the
    prompt is live).

    ``limit``, ``sample``, ``seed`` and ``shard`` select the samples (`Selection`; default: all).
    ``max_tokens`` (default: the model's limit) bounds the prompt, ``system`` is the system prompt,
    ``max_pixels`` and ``image_size`` make pictures and frames smaller (`Shrink`) for every arm. ``bar`` is
    updated after each sample.

    Lines, predictions and settings are kept in ``out_dir``; a second run there answers only missing items:
    other samples, new arms, failed items. A sample that fails is a line with its error and one of the
    result's ``problems``; the results cover the others. Raises ValueError for an unknown arm, TaskDataError
    for data in an unknown layout, for a folder of another run (model, settings, versions, data) and for one
    that another process is writing.
    """
    data, out_dir = Path(data), Path(out_dir)
    makers = arms_named(arms, others)
    if reuse not in get_args(ReusedPart):
        raise ValueError(f"reuse {reuse!r} is none of {', '.join(get_args(ReusedPart))}")
    shrink = Shrink(max_pixels, image_size)
    selection = Selection(limit, sample, seed, shard)
    engine = backbone.engine
    limit_tokens = room_of(engine) if max_tokens is None else max_tokens
    seams = engine.builder.seams(system)
    settings = {
        "task": task.name,
        "options": dict(task.settings),
        "backbone": engine.fingerprint,
        "system": system,
        "prompt": {"opening": seams.prefix, "closing": seams.tail},
        "max_tokens": limit_tokens,
        "reuse": reuse,
        "pictures": asdict(shrink),
        "versions": {"kamera": __version__, **{name: version(name) for name in ("torch", "transformers")}},
    }
    asked = {"data": str(data), "arms": list(arms), **asdict(selection)}
    with lock_run(out_dir):
        journal = Journal(out_dir, settings, resume, asked)
        asking = TaskAsker(engine, task, system, limit_tokens, reuse, shrink)
        problems: list[Problem] = []
        ids: list[str] = []
        for place, item in select(selection, task, data):
            if isinstance(item, Problem):
                problems.append(item)
                continue
            missing = journal.missing(item, makers)
            journal.add_row(SampleRow.of(item, place))
            for trial in asking.trials(item, missing, journal.first_token(item.id)) if missing else ():
                journal.add(trial)
            ids.append(item.id)
            if bar is not None:
                bar.update()
        return finish(task, journal, ids, list(arms), out_dir, problems)


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
    trials, remarks = [], list(problems)
    for id in ids:
        row, own = journal.rows[id], {arm: journal.trials.get((id, arm)) for arm in arms}
        lacking = [f"{id} was not asked under {arm}" for arm, trial in own.items() if trial is None]
        failed = [f"{arm}: {trial.error}" for arm, trial in own.items() if trial is not None and trial.error]
        if failed or lacking:
            remarks.append(Problem(row.sample.where, (failed or lacking)[0]))
            continue
        for arm, trial in own.items():
            assert trial is not None
            trials.append(trial)
            score = None if row.sample.answer is None else task.score(trial.answer, row.sample)
            answered[arm].append(Answered(row.sample, trial.answer, score))
    for name, of_arm in answered.items():
        folder = out_dir / "predictions" / name
        folder.mkdir(parents=True, exist_ok=True)
        task.write_predictions(of_arm, folder)
    return results_of_run(task, answered, trials, remarks)
