"""OVO-Bench: questions at a moment of a video, about what was, what is, and what is to come.

``ovo_bench_new.json`` (in the folder or in ``data/``), and videos below the folder or ``data/`` under the
names in the annotations, or ``chunked_videos/ID.mp4``, which end at the question. A unit is a frame of the
video up to the question, with its time. Forward tasks are asked at every moment of their ``test_info``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kamera.content import read_video
from kamera.errors import KameraError, TaskDataError
from kamera.eval.reuse.item import LEAST
from kamera.eval.tasks.letters import LETTERS
from kamera.eval.tasks.sample import Picture, Problem, TaskSample
from kamera.eval.tasks.set_files import find_in_set, read_json

CHOSEN = ("EPM", "ASI", "HLD", "STU", "OJR", "ATR", "ACR", "OCR", "FPD")
FORWARD = ("REC", "SSR", "CRR")
FILES = ("ovo_bench_new.json", "ovo_bench.json", "ovbench.json")


def read(data: Path, units: int) -> Iterator[TaskSample | Problem]:
    """Items of ``units`` evenly spaced frames. Raises TaskDataError without annotations."""
    roots = (data, data / "data")
    file = find_in_set(data, FILES, "OVO-Bench")
    for number, record in enumerate(read_json(file, list)):
        where = f"{file}:record {number}"
        for moment in _moments(record):
            try:
                yield _item(record, moment, _video(roots, record, moment), units)
            except (KameraError, KeyError, TypeError, IndexError) as error:
                yield Problem(where, f"{type(error).__name__}: {error}")


def _moments(record: Mapping[str, Any]) -> list[int | None]:
    """Indices into ``test_info`` of a forward task; one None for the others."""
    return list(range(len(record.get("test_info") or ()))) if record.get("task") in FORWARD else [None]


def _video(roots: tuple[Path, ...], record: Mapping[str, Any], moment: int | None) -> Path:
    name = f"{record['id']}" if moment is None else f"{record['id']}_{moment}"
    places = [root / "chunked_videos" / f"{name}.mp4" for root in roots]
    places += [root / folder / record["video"] for root in roots for folder in ("", "src_videos", "videos")]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise TaskDataError(f"no video {record['video']!r} (looked for {places[0]} and {places[-1]}, …)")
    return found


def _item(record: Mapping[str, Any], moment: int | None, video: Path, units: int) -> TaskSample:
    task = record["task"]
    shown = record if moment is None else record["test_info"][moment]
    end = None if video.parent.name == "chunked_videos" else float(shown["realtime"])
    clip = read_video(video, num_frames=max(units, LEAST), end=end)
    question, answer, choices, rule = _question(task, record, shown)
    return TaskSample(
        id=f"{record['id']}" if moment is None else f"{record['id']}/{moment}",
        task=task,
        parts=tuple(
            Picture(frame, caption=f"Frame at {second:.1f} s.\n")
            for frame, second in zip(clip.frames, clip.seconds, strict=True)
        ),
        question=question,
        answer=answer,
        choices=choices,
        meta={"rule": rule, "max_new_tokens": 16},
    )


def _question(
    task: str, record: Mapping[str, Any], shown: Mapping[str, Any]
) -> tuple[str, str, tuple[str, ...], str]:
    """Words of the question, label, choices, and rule."""
    if task in CHOSEN:
        options = tuple(map(str, record["options"]))
        lettered = "; ".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))
        asked = (
            f"Question: {record['question']}\nOptions:\n{lettered};\nRespond only with the letter "
            "corresponding to your chosen option (e.g., A, B, C)."
        )
        return asked, LETTERS[int(record["gt"])], options, "letter"
    if task == "REC":
        asked = (
            f"How many times did they {record['activity']}? Provide your answer as a single number (e.g., 0, "
            "1, 2, 3…) indicating the total count."
        )
        return asked, str(shown["count"]), (), "first-word"
    if task == "SSR":
        asked = (
            f"The following is one step of the procedure in this video: {shown['step']}\nIs the man or woman "
            "in the video currently performing this step? Answer only with “Yes” or “No”."
        )
    elif task == "CRR":
        asked = (
            f"{record['question']}\nDo the frames near the end of the video provide enough information to "
            "answer this question? Answer only with “Yes” or “No”."
        )
    else:
        raise TaskDataError(f"task {task!r} is none of {', '.join((*CHOSEN, *FORWARD))}")
    return asked, "yes" if int(shown["type"]) else "no", (), "first-word"
