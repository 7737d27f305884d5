"""MuirBench from its parquet files: prompts, pictures, scores, groups, and what is wrong with a row."""

from pathlib import Path
from typing import Any

import pytest

from kamera.eval.tasks.muirbench import MuirBench
from kamera.eval.tasks.sample import Answered, Passage, Picture, Problem, TaskSample
from tests.eval.tasks.fixtures.make_choice_sets import HERE, MUIRBENCH, cell, muir_row, write_table

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
