"""EgoSchema as published: guard, prompt, scores of the public subset, submission file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import TaskDataError
from kamera.eval.tasks.egoschema import EgoSchema
from kamera.eval.tasks.sample import Answered, Problem, TaskSample
from tests.eval.tasks.fixtures.make_choice_sets import (
    HERE,
    UIDS,
    ego_record,
)

SET = HERE / "egoschema"


def samples(data: Path = SET, limit: int | None = None, **options: Any) -> list[TaskSample]:
    return [s for s in EgoSchema(**options).load(data, limit) if isinstance(s, TaskSample)]


def problems(data: Path, **options: Any) -> list[str]:
    return [str(p) for p in EgoSchema(**options).load(data) if isinstance(p, Problem)]


def changed(tmp_path: Path, records: Any = None, answers: Any = None) -> Path:
    """The committed set with other questions or answers (where any are given)."""
    shutil.copytree(SET, tmp_path, dirs_exist_ok=True)
    if records is not None:
        (tmp_path / "questions.json").write_text(json.dumps(records))
    if answers is not None:
        (tmp_path / "subset_answers.json").write_text(json.dumps(answers))
    return tmp_path


def test_it_asks_in_lmms_evals_words() -> None:
    sample = samples()[0]
    assert sample.prompt == (
        "<video><video><video><video>What is c doing? (0)\n"
        "A. C cooks\nB. C cleans\nC. C reads\nD. C paints\nE. C sleeps\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert (sample.answer, sample.meta["q_uid"], sample.task) == ("D", UIDS[0], "subset")
    assert EgoSchema().max_new_tokens(sample) == 16


def test_the_first_letter_is_the_answer_and_none_is_wrong() -> None:
    task, sample = EgoSchema(), samples()[0]  # the answer is D
    right = ["D", "(D)", "D. C paints", "D or E", "I would say D"]
    wrong = ["E", "A or D", "d", "", "None", "painting"]
    assert [task.score(r, sample) for r in right + wrong] == [1.0] * 5 + [0.0] * 6


def test_accuracy_is_over_the_public_subset_alone() -> None:
    task = EgoSchema(subtasks=["full"])
    said = ["D", "hm", "A"]
    answered = [
        Answered(s, r, None if s.answer is None else task.score(r, s))
        for s, r in zip(samples(subtasks=["full"]), said, strict=True)
    ]
    summary = task.summarize(answered)
    assert (summary.official, summary.mean, summary.n) == (0.5, 0.5, 2)
    assert [(g.by, g.label, g.score, g.n) for g in summary.groups] == [
        ("task", "subset", 0.5, 2),
        ("extraction", "no option letter (counted wrong)", 0.0, 1),
    ]
    assert task.summarize(answered[2:]).n == 0


def test_the_submission_maps_uids_to_the_numbers_of_letters(tmp_path: Path) -> None:
    asked = samples(subtasks=["full"])
    answered = [Answered(s, r, None) for s, r in zip(asked, ["E", "hm", "(A)"], strict=True)]
    EgoSchema(subtasks=["full"]).write_predictions(answered, tmp_path)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == {UIDS[0]: 4, UIDS[2]: 0}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("record", "what"),
    [
        (ego_record(question=None), f"question of {UIDS[0]} is None, no text"),
        (ego_record(q_uid=None), "no q_uid in \"{'q_uid': None"),
        (["not", "a", "record"], "no q_uid in \"['not', 'a', 'record']\""),
        (ego_record(**{"option 4": None}), f"options of {UIDS[0]} are ['C cooks', "),
        (ego_record(1), f"egoschema/{UIDS[1]} occurs twice"),
        (ego_record(q_uid="gone"), "no video {videos}/gone with any of .mp4, .MP4, .mkv"),
    ],
)
def test_a_bad_record_is_named_and_the_others_are_asked(tmp_path: Path, record: Any, what: str) -> None:
    data = changed(tmp_path, [ego_record(1), record, ego_record(2)])
    found = problems(data, subtasks=["full"])
    where = f"{data / 'questions.json'}:record 1: "
    (named,) = [f for f in found if f.startswith(where)]
    assert named.removeprefix(where).startswith(what.replace("{videos}", str(data / "videos")))
    assert named.endswith("; skipped")
    assert [s.meta["q_uid"] for s in samples(data, subtasks=["full"])] == [UIDS[1], UIDS[2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"q_uid":\n"x", ', r"questions\.json:2: broken JSON"),
        ('{"q_uid": "x"}', r"questions\.json: a dict, not a list"),
    ],
)
def test_a_broken_or_foreign_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    data = changed(tmp_path)
    (data / "questions.json").write_text(text)
    with pytest.raises(TaskDataError, match=message):
        list(EgoSchema().load(data))
