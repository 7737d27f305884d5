"""MM-NIAH (OpenGVLab): needles in long documents of text and images, as published.

``DIR/mm_niah_val/annotations/{subtask}.jsonl`` next to the images of the tarball, or ``mm_niah_test``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.tasks.letters import LETTER_ONLY, LETTERS
from kamera.eval.tasks.mm_niah_score import DEPTHS, LABELS, HeatBin, bin_scores, decide, place, score_response
from kamera.eval.tasks.sample import (
    Answered,
    Cell,
    Passage,
    Picture,
    Problem,
    Summary,
    Task,
    TaskSample,
    interleave,
    mean,
    means_by,
)
from kamera.eval.tasks.set_files import missing_files, write_json, write_lines

SUBTASKS = (
    *("retrieval-text", "retrieval-image", "counting-text", "counting-image"),
    *("reasoning-text", "reasoning-image"),
)
IMAGE = "<image>"
_FIELDS: dict[str, Any] = {
    "id": (int, str),
    "images_list": list,
    "context": str,
    "question": str,
    "meta": dict,
}
_PHRASE = "\nAnswer the question using a single word or phrase."


class MMNiah(Task):
    """The benchmark's ``split``, with all existing subtasks or ``subtasks``.

    ``bare`` omits the answer instruction, for models that do not follow any; such scores are not comparable
    with published ones.
    """

    name = "mm-niah"
    offered = SUBTASKS  # overlong: official runs answer "None" when out of memory

    def __init__(self, subtasks: Sequence[str] = (), split: str = "val", bare: bool = False) -> None:
        if split not in ("val", "test"):
            raise ValueError(f"MM-NIAH has no split {split!r}: val or test")
        super().__init__(subtasks)
        self.split = split
        self.bare = bare

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"split": self.split, "bare": self.bare}

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        folder = data / f"mm_niah_{self.split}" / "annotations"
        files = {name: folder / f"{name}.jsonl" for name in self.subtasks or SUBTASKS}
        if not any(file.is_file() for file in files.values()):
            names = ", ".join(file.name for file in files.values())
            raise TaskDataError(f"no MM-NIAH annotations in {str(folder)!r}: expected {names}")
        others = (file for file in sorted(folder.glob("*.jsonl")) if file.stem not in SUBTASKS)
        yield [Problem(str(file), "unknown subtask") for file in others]
        for name, file in files.items():
            if file.is_file():
                yield self._samples(data, name, file)
        yield missing_files(files, self.subtasks, folder)

    def _samples(self, data: Path, name: str, file: Path) -> Iterator[TaskSample | Problem]:
        images: Path | None = None
        for number, line in _lines(file):
            where = f"{file}:{number}"
            record = _parse(line, name)
            if isinstance(record, str):
                yield Problem(where, record)
                continue
            if images is None and record["images_list"]:
                images = self._images(data, record["images_list"][0])
            missing = [i for i in _pictures(record) if images is None or not (images / i).is_file()]
            if missing:
                at = "no image folder" if images is None else str(images)
                yield Problem(where, f"missing image {missing[0]!r} ({at})")
                continue
            if _only_first_is_pattern(name, record["images_list"]):
                yield Problem(where, "the pattern is first in images_list, not last", skipped=False)
            yield self._sample(name, record, images, where)

    def _images(self, data: Path, first: str) -> Path | None:
        """The image folder; the val tarball extracts to ``mm_niah_dev``, in any folder."""
        top = f"mm_niah_{self.split}"
        inside = "mm_niah_dev" if self.split == "val" else top
        roots = [data / top / "images", data / top / inside / "images", data / inside / "images"]
        found = [root for root in roots if (root / first).is_file()]
        there = found or [root for root in roots if root.is_dir()]
        return there[0] if there else None

    def _sample(self, name: str, record: Mapping[str, Any], images: Path | None, where: str) -> TaskSample:
        meta, subtask = record["meta"], f"{name}-{self.split}"
        context, first = (record["context"] + "\n").split(IMAGE), record["context"].count(IMAGE)
        pictures: list[Picture] = []
        if images is not None:
            pictures = [Picture(images / i, live=n >= first) for n, i in enumerate(_pictures(record))]
        live = interleave(self._question(record).split(IMAGE), pictures[first:], live=True)
        *parts, question = [*interleave(context, pictures[:first]), *live]
        return TaskSample(
            id=f"{subtask}/{record['id']}",
            task=subtask,
            parts=tuple(parts),
            question=question.text if isinstance(question, Passage) else "",
            answer=_answer(name, record.get("answer")),
            choices=tuple(meta.get("choices") or meta.get("choices_image_path") or ()),
            meta={
                "question_id": record["id"],
                "question": record["question"],
                "context_length": meta["context_length"],
                "placed_depth": meta["placed_depth"],
            },
            where=where,
        )

    def _question(self, record: Mapping[str, Any]) -> str:
        meta = record["meta"]
        options = meta.get("choices") or [IMAGE for _ in meta.get("choices_image_path") or ()]
        lettered = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        instruction = "" if self.bare else LETTER_ONLY if options else _PHRASE
        return f"{record['question']}{lettered}{instruction}"

    def max_new_tokens(self, sample: TaskSample) -> int:
        return 32 if sample.task.startswith("counting") else 16

    def score(self, response: str, sample: TaskSample) -> float:
        return score_response(response, sample.answer)

    def decision(self, response: str, sample: TaskSample) -> str:
        # labels of test are private: the kind of answer does not depend on them
        kind = int if sample.choices else list if sample.task.startswith("counting") else str
        return decide(response, kind if sample.answer is None else type(sample.answer))

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Official: the mean over eleven context lengths of subtasks' means over five depths."""
        placed = _by_place(answered)
        bins = {task: bin_scores((at, score) for at, score in scored) for task, scored in placed.items()}
        overall = [mean(column) for column in zip(*bins.values(), strict=True)]
        scored = sorted((at, score) for pairs in placed.values() for at, score in pairs)
        count = Counter(at.column for at, _ in scored)
        lengths = [
            Cell("context length (official)", LABELS[i], score, count[i])
            for i, score in enumerate(overall)
            if count[i]
        ]
        places = means_by("length and depth", ((_cell(at), score) for at, score in scored))
        subtasks = means_by("subtask", ((task, score) for task in placed for _, score in placed[task]))
        short = sum(n for column, n in count.items() if column < 0)
        how = "mean of 11 length bins, each of 5 depth rows; empty rows count 0"
        how += f"; {short} below 1k tokens do not count" if short else ""
        official = mean(overall) if any(count[i] for i in range(len(LABELS))) else float("nan")
        return Summary.of(answered, how, (*subtasks, *lengths, *places), official)

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """``{arm}_{subtask}.jsonl`` as the official scorer reads them, and its ``scores_{split}.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        lines: dict[str, list[Any]] = defaultdict(list)
        for a in answered:
            meta = a.sample.meta
            line = {key: meta[key] for key in ("question_id", "question")}
            line |= {"answer": a.sample.answer, "response": a.response}
            line |= {key: meta[key] for key in ("context_length", "placed_depth")}
            lines[a.sample.task].append(line)
        for task, rows in lines.items():
            write_lines(folder / f"{folder.name}_{task}.jsonl", rows)
        bins: dict[str, list[Any]] = {
            task: bin_scores(scored) for task, scored in _by_place(answered).items()
        }
        if len(bins) == len(SUBTASKS):
            bins["overall"] = [round(mean(column), 6) for column in zip(*bins.values(), strict=True)]
        if bins:
            (folder / "results").mkdir(exist_ok=True)
            scores = {**bins, "context_ranges": LABELS}
            write_json(folder / "results" / f"scores_{self.split}.json", scores, indent=1)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())


def _parse(line: str, name: str) -> dict[str, Any] | str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"no JSON, the line is truncated or damaged ({error})"
    if not isinstance(record, dict):
        return f"a {type(record).__name__}, not a record"
    for key, kinds in _FIELDS.items():
        if not isinstance(record.get(key), kinds):
            return f"{key!r} is missing or of the wrong type"
    meta = record["meta"]
    depths = meta.get("placed_depth")
    depths = depths if isinstance(depths, list) else [depths]
    if not depths or not all(isinstance(d, int | float) and 0.0 <= d <= 1.0 for d in depths):
        return f"placed_depth {meta.get('placed_depth')!r} is not a depth between 0 and 1"
    if not isinstance(meta.get("context_length"), int | float):
        return f"context_length {meta.get('context_length')!r} is not a number"
    for key in ("choices", "choices_image_path"):
        if not _all_text(meta.get(key) or []):
            return f"{key} {meta[key]!r} is not a list of text"
    if not _all_text(record["images_list"]):
        return "images_list holds other things than file names"
    if meta.get("choices") and meta.get("choices_image_path"):
        return "choices and choices_image_path are both given"
    texts = (record["context"], record["question"], *(meta.get("choices") or ()))
    marks = sum(text.count(IMAGE) for text in texts)
    if marks != len(record["images_list"]):
        return f"{marks} <image> placeholders for {len(record['images_list'])} images"
    try:
        answer = _answer(name, record.get("answer"))
    except ValueError:
        return f"answer {record['answer']!r} is not a list of counts"
    if answer is not None and not isinstance(answer, int | list | str):
        return f"answer {answer!r} is not a choice, list or text"
    return record


def _all_text(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, str) for item in items)


def _pictures(record: Mapping[str, Any]) -> list[str]:
    """Context, then question, then choices: the order of their placeholders."""
    return [*record["images_list"], *(record["meta"].get("choices_image_path") or ())]


def _answer(name: str, answer: Any) -> Any:
    """Counting answers may be lists written as text."""
    return json.loads(answer) if name.startswith("counting") and isinstance(answer, str) else answer


def _only_first_is_pattern(name: str, pictures: Sequence[str]) -> bool:
    patterns = ["abnormal_pic" in picture for picture in pictures]
    return name == "counting-image" and len(patterns) > 1 and patterns[0] and not any(patterns[1:])


def _by_place(answered: Sequence[Answered]) -> dict[str, list[tuple[HeatBin, float]]]:
    placed: dict[str, list[tuple[HeatBin, float]]] = defaultdict(list)
    for a in answered:
        if a.score is not None:
            where = place(a.sample.meta["context_length"], a.sample.meta["placed_depth"])
            placed[a.sample.task].append((where, a.score))
    return dict(sorted(placed.items()))


def _cell(at: HeatBin) -> str:
    length = LABELS[at.column] if at.column >= 0 else "<1k"
    return f"{length}, depth {at.row / DEPTHS:.1f}-{(at.row + 1) / DEPTHS:.1f}"
