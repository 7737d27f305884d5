"""Join the runs of several folders (shards, other samples, other arms) into one, without model or data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

from kamera.errors import TaskDataError
from kamera.eval.tasks.journal import Journal, check_same, lock_run, read_header
from kamera.eval.tasks.registry import make_task
from kamera.eval.tasks.report import Results
from kamera.eval.tasks.run import finish


def merge(folders: Sequence[str | Path], out_dir: str | Path) -> Results:
    """Join the runs in ``folders`` into one in ``out_dir``; returns its results.

    Raises ValueError for an ``out_dir`` that holds a run and for a folder given twice; TaskDataError for
    folders with different settings, of another format, being written, or with different answers to one item.
    """
    parts, out_dir = [Path(folder) for folder in folders], Path(out_dir)
    if not parts or len({part.resolve() for part in (*parts, out_dir)}) <= len(parts):
        raise ValueError("give at least one run, each once, and another folder to write to")
    headers = [read_header(part) for part in parts]
    settings = headers[0]["settings"]
    for part, header in zip(parts[1:], headers[1:], strict=True):
        check_same(part, header["settings"], settings)
    arms = list(dict.fromkeys(arm for header in headers for arm in header["asked"]["arms"]))
    asked = {"arms": arms, "merged": [header["asked"] for header in headers]}
    with ExitStack() as stack:
        for part in (*parts, out_dir):
            stack.enter_context(lock_run(part))
        joined = Journal(out_dir, settings, resume=False, asked=asked)
        for part, header in zip(parts, headers, strict=True):
            _take(joined, Journal(part, settings, asked=header["asked"]))
        ids = [row.sample.id for row in sorted(joined.rows.values(), key=attrgetter("at", "sample.id"))]
        task = make_task(settings["task"], **settings["options"])
        return finish(task, joined, ids, arms, out_dir)


def _take(joined: Journal, part: Journal) -> None:
    for row in part.rows.values():
        before = joined.rows.get(row.sample.id)
        if before is not None and before.digest != row.digest:
            raise TaskDataError(
                f"{part.path.parent} has another {row.sample.id}: its data differ from the others'"
            )
        joined.add_row(row)
    for trial in part.trials.values():
        known = joined.trials.get((trial.item, trial.arm))
        if known is None or (known.error and not trial.error):
            joined.add(trial)
        elif not trial.error and (known.answer, known.note) != (trial.answer, trial.note):
            raise TaskDataError(
                f"{part.path.parent} answers {trial.item} under {trial.arm} differently from an earlier "
                "folder"
            )
