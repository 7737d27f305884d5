"""MileBench's result files, in the format of its own tools."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.eval.tasks.milebench_score import extract_choice, process
from kamera.eval.tasks.sample import Answered, TaskSample, mean
from kamera.eval.tasks.set_files import write_json


def write_predictions(answered: Sequence[Answered], folder: Path) -> None:
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
            extracted = [{**_prediction(a, folder.name), **_extract(a)} for a in items]
            documents["pred_with_extracted.json"] = extracted
        for file, document in documents.items():
            write_json(folder / name / file, document)


def quantity(sample: TaskSample) -> str:
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


def _extract(a: Answered) -> Mapping[str, Any]:
    options = [process(choice) for choice in a.sample.choices]
    return {"extracted": extract_choice(process(a.response), options), "result": a.score}


def _item_score(a: Answered) -> dict[str, str | None]:
    whole, score = a.sample.meta["metric"] != "rouge-l", a.score
    told = None if score is None else str(int(score) if whole else round(score, 3))
    return {"id": str(a.sample.meta["sample_id"]), "score": told}


def _evaluation(items: Sequence[Answered]) -> dict[str, Any]:
    scored = [(quantity(a.sample), a.score) for a in items if a.score is not None]
    levels = {level: [s for at, s in scored if at == level] for level in ("Few", "Medium", "Many")}
    name = "Rouge-L f" if items[0].sample.meta["metric"] == "rouge-l" else "Accuracy"
    return {
        name: mean([score for _, score in scored]) if scored else None,
        "image_quantity_level-Accuracy": {k: mean(v) if v else 0 for k, v in levels.items()},
        "image_quantity_level-Result": {k: [sum(v), len(v)] for k, v in levels.items()},
    }
