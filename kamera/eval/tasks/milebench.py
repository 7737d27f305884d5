"""MileBench (FreedomIntelligence): 29 long-context tasks over many images, as published.

``DIR/{Task}/{Task}.json`` next to ``DIR/{Task}/images/``; the archives' top folder ``MileBench``
(``MLBench`` in old snapshots) may be ``DIR`` or in it. The combined-image and adversarial variants are not
read: they have one image, and no context to reuse.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.tasks.milebench_score import Metric, decide, metric_of, process, score_response
from kamera.eval.tasks.sample import (
    Answered,
    Cell,
    Part,
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
from kamera.eval.tasks.set_files import missing_files, read_json, write_json

CODES = {
    "T-1": ("ActionLocalization", "ActionPrediction", "ActionSequence"),
    "T-2": ("ObjectExistence", "ObjectInteraction", "MovingAttribute", "ObjectShuffle"),
    "T-3": ("EgocentricNavigation", "MovingDirection"),
    "T-4": ("CounterfactualInference", "StateChange", "CharacterOrder", "SceneTransition"),
    "S-1": ("WebQA", "TQA", "MultiModalQA", "WikiVQA"),
    "S-2": ("SlideVQA", "OCR-VQA", "DocVQA"),
    "S-3": ("Spot-the-Diff", "CLEVR-Change", "IEdit"),
    "S-4": ("MMCoQA", "ALFRED"),
    "S-5": ("nuscenes",),
    "NH": ("TextNeedleInAHaystack", "ImageNeedleInAHaystack"),
    "IR": ("GPR1200",),
}
"""The benchmark's task codes and their datasets."""

SUBTASKS = tuple(name for names in CODES.values() for name in names)
_PLACEHOLDER = re.compile(r"\{(?:image|table)#(\d+)\}")


class MileBench(Task):
    """All existing datasets, or ``subtasks`` (dataset names or codes such as ``T-1``)."""

    name = "milebench"
    offered = (*SUBTASKS, *CODES)
    overlong = "left"

    def __init__(self, subtasks: Sequence[str] | None = None) -> None:
        super().__init__(subtasks)
        self.subtasks = tuple(dict.fromkeys(n for name in self.subtasks for n in CODES.get(name, (name,))))

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        root = next((root for root in (data, data / "MileBench", data / "MLBench") if _datasets(root)), None)
        if root is None:
            raise TaskDataError(
                f"no MileBench datasets in {str(data)!r}: expected TQA/TQA.json and the like, or a folder "
                "MileBench of them"
            )
        yield [Problem(str(root / name), "unknown task") for name in _datasets(root) if name not in SUBTASKS]
        files = {name: root / name / f"{name}.json" for name in SUBTASKS}
        for name in self.subtasks or SUBTASKS:
            if files[name].is_file():
                yield _samples(files[name])
        yield missing_files(files, self.subtasks, root)

    def max_new_tokens(self, sample: TaskSample) -> int:
        return 512

    def score(self, response: str, sample: TaskSample) -> float:
        return score_response(response, sample.answer, sample.choices, sample.meta["metric"])

    def decision(self, response: str, sample: TaskSample) -> str:
        return decide(response, sample.choices, sample.meta["metric"])

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Official: the mean over task codes of their datasets' means."""
        scored = [(a.sample, a.score) for a in answered if a.score is not None]
        datasets = means_by("dataset", ((s.task, score) for s, score in scored))
        by_code = [
            Cell("code", code, mean([d.score for d in own]), sum(d.n for d in own))
            for code, names in CODES.items()
            if (own := [d for d in datasets if d.label in names])
        ]
        groups = (*by_code, *datasets, *means_by("images", ((_quantity(s), score) for s, score in scored)))
        how = f"mean of {len(by_code)} of {len(CODES)} task codes, each the mean of its datasets"
        return Summary.of(answered, how, groups, mean([group.score for group in by_code]))

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """``{Dataset}/pred.json``, ``eval.json``, ``eval_score.json`` and extracted choices, of one arm."""
        by_dataset: dict[str, list[Answered]] = defaultdict(list)
        for a in answered:
            by_dataset[a.sample.task].append(a)
        for name, items in by_dataset.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            documents: dict[str, Any] = {
                "pred.json": [_prediction(a, folder.name) for a in items],
                "eval.json": _evaluation(items),
                "eval_score.json": [_item_score(a) for a in items],
            }
            if items[0].sample.meta["metric"] == "choice":
                documents["pred_with_extracted.json"] = [
                    _prediction(a, folder.name)
                    | {"extracted": self.decision(a.response, a.sample), "result": a.score}
                    for a in items
                ]
            for file, document in documents.items():
                write_json(folder / name / file, document)


def _datasets(root: Path) -> list[str]:
    return sorted(file.parent.name for file in root.glob("*/*.json") if file.stem == file.parent.name)


def _samples(file: Path) -> Iterator[TaskSample | Problem]:
    try:
        document = read_json(file, dict)
        head, records = document.get("meta_data"), document.get("data")
        if not isinstance(head, dict) or not isinstance(head.get("task_instruction"), list):
            raise ValueError("no meta_data with task_instruction")
        if not isinstance(records, list):
            raise ValueError("no list of samples under 'data'")
        metric = metric_of(file.stem, head.get("question_type"))
    except TaskDataError as error:
        where, _, what = str(error).partition(": ")
        yield Problem(where, what)
        return
    except ValueError as error:
        yield Problem(str(file), str(error))
        return
    for number, record in enumerate(records):
        yield from _sample(file.parent, f"{file}:data[{number}]", record, head["task_instruction"], metric)


def _sample(
    folder: Path, where: str, record: Any, instructions: Sequence[str], metric: Metric
) -> Iterator[TaskSample | Problem]:
    """One record's sample, possibly after a remark, or its error."""
    wrong = _wrong(record, instructions, metric)
    if wrong:
        yield Problem(where, wrong)
        return
    instance = record["task_instance"]
    context, paths = instance["context"], instance["images_path"]
    named = [int(number) for number in _PLACEHOLDER.findall(context)]
    missing = [paths[k - 1] for k in named if not (folder / "images" / paths[k - 1]).is_file()]
    if missing:
        yield Problem(where, f"missing image {missing[0]!r} ({folder / 'images'})")
        return
    if len(named) != len(paths):
        yield Problem(where, f"{len(named)} placeholders for {len(paths)} images", skipped=False)
    choices = tuple(str(choice) for choice in instance.get("choice_list") or ())
    instruction = instructions[record["task_instruction_id"]] + "\n"
    asked = _question_start(context)
    shown = _parts(context[:asked], folder / "images", paths, live=False)
    *live, question = _parts(
        context[asked:] + _list_options(folder.name, choices), folder / "images", paths, live=True
    )
    parts = (Passage(instruction), *(p for p in (*shown, *live) if not isinstance(p, Passage) or p.text))
    yield TaskSample(
        id=f"{folder.name}/{record['sample_id']}",
        task=folder.name,
        parts=parts,
        question=question.text if isinstance(question, Passage) else "",
        answer=None if record.get("response") is None else str(record["response"]),
        choices=choices,
        meta={"sample_id": int(record["sample_id"]), "images_path": tuple(paths), "metric": metric},
        where=where,
        head=1,
    )


def _question_start(context: str) -> int:
    """Start of the question: at the last "Question:", else after the last image."""
    marked = context.rfind("Question:")
    ends = [match.end() for match in _PLACEHOLDER.finditer(context)]
    return marked if marked >= 0 else max(ends, default=0)


def _parts(text: str, images: Path, paths: Sequence[str], live: bool) -> list[Part]:
    texts, numbers = _PLACEHOLDER.split(text)[::2], _PLACEHOLDER.findall(text)
    return interleave(texts, [Picture(images / paths[int(n) - 1], live) for n in numbers], live)


def _wrong(record: Any, instructions: Sequence[str], metric: Metric) -> str:
    """The error in a record, or ""."""
    instance = record.get("task_instance") if isinstance(record, dict) else None
    if not isinstance(instance, dict) or not isinstance(instance.get("context"), str):
        return "no task_instance with a context"
    if not str(record.get("sample_id")).isdecimal():
        return f"sample_id {record.get('sample_id')!r} is not a number"
    chosen = record.get("task_instruction_id")
    if not isinstance(chosen, int) or not 0 <= chosen < len(instructions):
        return f"task_instruction_id {chosen!r} of {len(instructions)} instructions"
    paths = instance.get("images_path")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return "images_path is not a list of file names"
    for number in _PLACEHOLDER.findall(instance["context"]):
        if not 1 <= int(number) <= len(paths):
            return f"placeholder {number} for {len(paths)} images"
    if metric == "choice":
        choices = instance.get("choice_list")
        if not isinstance(choices, list) or not choices:
            return "a multi-choice sample without choice_list"
        truth = record.get("response")
        if truth is not None and process(str(truth)) not in [process(str(c)) for c in choices]:
            return f"response {truth!r} is none of its choices"
    return ""


def _list_options(task: str, choices: Sequence[str]) -> str:
    """The options as lines of the prompt; GPR1200 has too many for letters."""
    if not choices:
        return ""
    letters = ["" if task == "GPR1200" else f"{chr(ord('A') + i)}. " for i in range(len(choices))]
    lines = "\n".join(letter + choice for letter, choice in zip(letters, choices, strict=True))
    return f"\nChoice list: \n{lines}\nYour answer is: "


def _quantity(sample: TaskSample) -> str:
    """The benchmark's level of a sample, by its number of images."""
    count = len(sample.meta["images_path"])
    return "Few" if count < 6 else "Many" if count > 31 else "Medium"


def _prediction(a: Answered, model: str) -> dict[str, Any]:
    return {
        "sample_id": a.sample.meta["sample_id"],
        "image": list(a.sample.meta["images_path"]),
        "question": a.sample.prompt.replace("<image>", "<ImageHere>"),
        "gt_response": a.sample.answer,
        "gen_model_id": model,
        "pred_response": a.response,
        "gen_kwargs": {"do_sample": False, "max_new_tokens": 512},
    }


def _item_score(a: Answered) -> dict[str, str | None]:
    whole, score = a.sample.meta["metric"] != "rouge-l", a.score
    told = None if score is None else str(int(score) if whole else round(score, 3))
    return {"id": str(a.sample.meta["sample_id"]), "score": told}


def _evaluation(items: Sequence[Answered]) -> dict[str, Any]:
    scored = [(_quantity(a.sample), a.score) for a in items if a.score is not None]
    levels = {level: [s for at, s in scored if at == level] for level in ("Few", "Medium", "Many")}
    name = "Rouge-L f" if items[0].sample.meta["metric"] == "rouge-l" else "Accuracy"
    return {
        name: mean([score for _, score in scored]) if scored else None,
        "image_quantity_level-Accuracy": {k: mean(v) if v else 0 for k, v in levels.items()},
        "image_quantity_level-Result": {k: [sum(v), len(v)] for k, v in levels.items()},
    }
