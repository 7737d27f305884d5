"""EgoSchema as published: guard, prompt, scores of the public subset, submission file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import TaskDataError
from kamera.eval.tasks.egoschema import EgoSchema
from kamera.eval.tasks.sample import Answered, Problem, TaskSample, Video
from tests.eval.tasks.fixtures.make_choice_sets import (
    HERE,
    UIDS,
    ego_record,
    egoschema,
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


def test_the_subset_has_labels_and_the_full_set_all_questions() -> None:
    assert [s.answer for s in samples()] == ["D", "E"]
    assert [s.meta["q_uid"] for s in samples(subtasks=["full"])] == list(UIDS)
    assert len(samples(subtasks=["full"], limit=2)) == 2


def test_only_the_public_subset_of_the_full_set_is_labelled() -> None:
    assert [(s.answer, s.task) for s in samples(subtasks=["full"])] == [
        ("D", "subset"),
        ("E", "subset"),
        (None, "full"),
    ]


def test_frames_are_spread_over_the_video_of_the_questions_uid() -> None:
    clips = [p.source for p in samples(num_frames=4, clips=2)[1].parts if isinstance(p, Video)]
    assert [clip.indices for clip in clips] == [(0, 2), (5, 7)]


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


def test_a_snapshot_without_questions_is_refused_by_name(tmp_path: Path) -> None:
    records = [ego_record(i) for i in range(3)]
    for record in records:
        del record["question"]
    data = changed(tmp_path, records)
    with pytest.raises(TaskDataError, match=r"questions\.json: no record has a question: a published snap"):
        list(EgoSchema().load(data))


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


def test_an_answer_out_of_range_or_to_no_question_is_named(tmp_path: Path) -> None:
    data = changed(tmp_path, answers={UIDS[0]: 5, UIDS[1]: 4, "gone": 1})
    assert problems(data) == [
        f"{data / 'subset_answers.json'}: no question 'gone'; skipped",
        f"{data / 'questions.json'}:record 0: answer 5 of {UIDS[0]} is not a number 0 to 4; skipped",
    ]


def test_a_video_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    data = changed(tmp_path)
    (data / "videos" / f"{UIDS[0]}.mp4").write_bytes(b"no video")
    (problem,) = problems(data)
    assert f"{UIDS[0]}.mp4' cannot be decoded" in problem
    assert len(samples(data)) == 1


def test_without_public_answers_only_the_full_set_is_asked(tmp_path: Path) -> None:
    data = changed(tmp_path)
    (data / "subset_answers.json").unlink()
    with pytest.raises(TaskDataError, match=r"subset_answers\.json: no such file, so nothing to score"):
        list(EgoSchema().load(data))
    (remark,) = problems(data, subtasks=["full"])
    assert remark == f"{data / 'questions.json'}: 3 samples have private labels: predictions only"
    assert [s.answer for s in samples(data, subtasks=["full"])] == [None] * 3


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


def test_unknown_layouts_and_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"questions\.json: no such file: give the EgoSchema folder"):
        list(EgoSchema().load(tmp_path))
    with pytest.raises(ValueError, match="egoschema has no subtask 'MC_PPL': subset, full"):
        EgoSchema(subtasks=["MC_PPL"])


def test_the_committed_set_is_what_its_script_writes(tmp_path: Path) -> None:
    egoschema(tmp_path)
    for name in ("questions.json", "subset_answers.json"):
        assert (SET / name).read_text() == (tmp_path / name).read_text()
    assert len(samples(tmp_path, subtasks=["full"])) == 3
