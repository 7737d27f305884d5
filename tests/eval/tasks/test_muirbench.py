"""MuirBench from its parquet files: prompts, pictures, scores, groups, and what is wrong with a row."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kamera.errors import TaskDataError
from kamera.eval.tasks.muirbench import TASKS, MuirBench
from kamera.eval.tasks.sample import Answered, Passage, Picture, Problem, TaskSample
from tests.eval.tasks.fixtures.make_choice_sets import HERE, MUIRBENCH, cell, muir_row, muirbench, write_table

SET = HERE / "muirbench"


def samples(data: Path = SET, limit: int | None = None, **options: Any) -> list[TaskSample]:
    return [s for s in MuirBench(**options).load(data, limit) if isinstance(s, TaskSample)]


def problems(data: Path, *rows: dict[str, Any]) -> list[str]:
    write_table(data / "data/test-00000-of-00001.parquet", rows, MUIRBENCH)
    return [str(p) for p in MuirBench().load(data) if isinstance(p, Problem)]


def answer(responses: list[str], **options: Any) -> list[Answered]:
    task = MuirBench(**options)
    asked = samples(**options)
    return [Answered(s, r, task.score(r, s)) for s, r in zip(asked, responses, strict=True)]


def test_the_prompt_is_the_benchmarks_own() -> None:
    assert samples()[0].prompt == (
        "Question: <image> Which image has the colour of the first?\n"
        "Choices:\n(A) <image>\n(B) <image>\n(C) None of the choices provided\n"
        "Hint: Please provide the correct option letter, such as A, B, C, D, directly.\nAnswer:"
    )


def test_the_prompt_is_lmms_evals() -> None:
    assert samples(form="lmms-eval")[0].prompt == (
        "<image> Which image has the colour of the first?\nA. <image>\nB. <image>\n"
        "C. None of the choices provided\nAnswer with the option's letter from the given choices directly."
    )


def test_pictures_replace_their_marks_in_order() -> None:
    parts = samples()[0].parts
    assert [p.text if isinstance(p, Passage) else p.source.getpixel((0, 0)) for p in parts] == [
        "Question: ",
        (255, 0, 0),
        " Which image has the colour of the first?\nChoices:\n(A) ",
        (0, 0, 255),
        "\n(B) ",
        (255, 0, 0),
    ]
    in_a_row = samples()[3].parts
    assert [type(p) for p in in_a_row] == [Passage, Picture, Picture, Picture]
    assert samples()[3].question.startswith("\nChoices:\n(A) 1, 2, 3\n")


def test_samples_name_their_row_their_task_and_their_counterpart() -> None:
    asked = samples()
    assert [s.id for s in asked] == [f"muirbench/{idx}" for idx in (17, 18, 40, 77)]
    assert [s.task for s in asked] == ["Visual Retrieval", "Visual Retrieval", "Counting", "Ordering"]
    assert asked[2].where == f"{SET / 'data/test-00001-of-00002.parquet'}:row 0"
    assert [s.meta["counterpart_idx"] for s in asked] == ["18", "17", "41", "78"]
    assert [s.meta["answerable"] for s in asked] == [True, False, True, True]
    assert MuirBench().max_new_tokens(asked[0]) == 16


def test_the_limit_spans_shards_and_tasks_can_be_chosen() -> None:
    assert [s.meta["idx"] for s in samples(limit=3)] == ["17", "18", "40"]
    assert [s.meta["idx"] for s in samples(subtasks=["Ordering", "Counting"])] == ["40", "77"]
    assert [s.meta["idx"] for s in samples(subtasks=["Ordering"], limit=1)] == ["77"]
    assert len(TASKS) == 12
    with pytest.raises(ValueError, match="muirbench has no subtask 'Juggling': Geographic"):
        MuirBench(subtasks=["Juggling"])
    with pytest.raises(ValueError, match="'chat' is none of official, lmms-eval"):
        MuirBench(form="chat")  # type: ignore[arg-type]


def test_official_extraction_takes_the_last_letter() -> None:
    task, sample = MuirBench(), samples()[0]
    right = ["B", "(B)", "B.", "Not (A) but (B)", "the answer is B"]
    wrong = ["A", "(B) or (C)", "b", "no idea", "", "None"]
    assert [task.score(r, sample) for r in right + wrong] == [1.0] * 5 + [0.0] * 6


def test_lmms_eval_extraction_wants_the_letter_alone_or_first() -> None:
    task, sample = MuirBench(form="lmms-eval"), samples(form="lmms-eval")[0]
    right = ["B", "b ", "B. the second", "\nB."]
    wrong = ["(B)", "The answer is B", "A. B", ""]
    assert [task.score(r, sample) for r in right + wrong] == [1.0] * 4 + [0.0] * 4


def test_accuracy_is_overall_and_per_task_and_pairs_need_both() -> None:
    summary = MuirBench().summarize(answer(["B", "A", "B", "dunno"]))
    assert (summary.official, summary.mean, summary.n) == (0.5, 0.5, 4)
    assert [(g.by, g.label, g.score, g.n) for g in summary.groups] == [
        ("task", "Visual Retrieval", 0.5, 2),
        ("task", "Counting", 1.0, 1),
        ("task", "Ordering", 0.0, 1),
        ("kind", "answerable", pytest.approx(2 / 3), 3),
        ("kind", "unanswerable", 0.0, 1),
        ("kind", "both of a pair", 0.0, 1),
        ("extraction", "no option letter (counted wrong)", 0.0, 1),
    ]
    both = {g.label: g.score for g in MuirBench().summarize(answer(["B", "C", "B", "A"])).groups}
    assert both["both of a pair"] == 1.0
    assert MuirBench().summarize([]).n == 0


def test_predictions_hold_the_response_and_its_reading(tmp_path: Path) -> None:
    MuirBench().write_predictions(answer(["(B)", "?", "B", "A"]), tmp_path)
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["idx"], x["answer"], x["pred"], x["response"]) for x in lines[:2]] == [
        ("17", "B", "B", "(B)"),
        ("18", "C", None, "?"),
    ]
    assert lines[0]["image_relation"] == "Partial Similarity"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (muir_row(image_list=[cell("red")]), "3 <image> in question and options, 1 images"),
        (muir_row(image_list=[cell("red")] * 4), "3 <image> in question and options, 4 images"),
        (muir_row(image_list=None), "image_list is empty"),
        (muir_row(image_list=[cell("red"), None, cell("red")]), "image_list holds no picture bytes"),
        (
            muir_row(image_list=[cell("red"), {"bytes": None, "path": "x.png"}, cell("red")]),
            "image_list holds no picture bytes",
        ),
        (
            muir_row(image_list=[cell("red"), {"bytes": b"GIF", "path": None}, cell("red")]),
            "image_list holds a picture that cannot be read",
        ),
        (
            muir_row(image_list=[{"bytes": cell("red")["bytes"][:60], "path": None}] * 3),
            "image_list holds a picture that cannot be read",
        ),
        (muir_row(task="Juggling"), "unknown task 'Juggling'"),
        (muir_row(question=None), "question is None, no text"),
        (muir_row(answer=None), "answer is None, no text"),
        (muir_row(answer="D"), "answer 'D' is none of the 3 options"),
        (muir_row(options=[]), "options are []"),
        (muir_row(options=["<image>", None]), "options are ['<image>', None]"),
    ],
)
def test_a_bad_row_is_named_and_skipped_and_the_next_is_asked(
    tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    (problem,) = problems(tmp_path, row, muir_row("99"))
    assert problem.startswith(f"{tmp_path / 'data/test-00000-of-00001.parquet'}:row 0: {what}")
    assert problem.endswith("; skipped")
    assert [s.meta["idx"] for s in samples(tmp_path)] == ["99"]


def test_an_item_that_stands_there_twice_is_asked_once(tmp_path: Path) -> None:
    assert problems(tmp_path, muir_row(), muir_row()) == [
        f"{tmp_path / 'data/test-00000-of-00001.parquet'}:row 1: muirbench/17 occurs twice; skipped"
    ]


def test_a_broken_shard_is_refused_behind_the_whole_ones(tmp_path: Path) -> None:
    muirbench(tmp_path)
    broken = tmp_path / "data/test-00001-of-00002.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    asked = MuirBench().load(tmp_path)
    assert [s.meta["idx"] for s in (next(asked), next(asked)) if isinstance(s, TaskSample)] == ["17", "18"]
    with pytest.raises(TaskDataError, match=r"test-00001-of-00002\.parquet: not a readable parquet file"):
        next(asked)


def test_a_folder_in_another_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"no data/test-\*\.parquet"):
        list(MuirBench().load(tmp_path))
    table = pq.read_table(SET / "data/test-00000-of-00002.parquet").drop_columns(["options"])
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data/test-00000-of-00001.parquet")
    with pytest.raises(TaskDataError, match=r"parquet: no column \['options'\], it has \['idx'"):
        list(MuirBench().load(tmp_path))


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskDataError, match=r"pip install 'kamera\[eval\]'"):
        list(MuirBench().load(SET))


def test_the_committed_set_is_what_its_script_writes(tmp_path: Path) -> None:
    muirbench(tmp_path)
    shards = sorted((SET / "data").iterdir())
    assert len(shards) == 2
    for shard in shards:
        assert pq.read_table(shard).equals(pq.read_table(tmp_path / "data" / shard.name))
