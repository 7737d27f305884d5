"""Video-MME from its files: clips, subtitles of the sampled frames, prompts, scores, result JSON."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kamera.eval.tasks.clips import split
from kamera.eval.tasks.sample import Answered, Problem, TaskSample, Video
from kamera.eval.tasks.video_mme import VideoMME
from tests.eval.tasks.fixtures.make_choice_sets import HERE, VIDEO_MME, mme_row, write_table

SET = HERE / "video_mme"
BOTH = ["without-subtitles", "with-subtitles"]
ASK = (
    "Select the best answer to the following multiple-choice question based on the video. "
    "Respond with only the letter (A, B, C, or D) of the correct option.\n"
    "Which colour is frame 1?\nA. Red.\nB. Lime.\nC. Blue.\nD. Yellow.\nThe best answer is:"
)


def samples(data: Path = SET, limit: int | None = None, **options: Any) -> list[TaskSample]:
    return [s for s in VideoMME(**options).load(data, limit) if isinstance(s, TaskSample)]


def changed(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    """The committed set with other rows (where any are given)."""
    shutil.copytree(SET, tmp_path, dirs_exist_ok=True)
    if rows:
        write_table(tmp_path / "videomme/test-00000-of-00001.parquet", rows, VIDEO_MME)
    return tmp_path


def problems(data: Path, **options: Any) -> list[str]:
    return [str(p) for p in VideoMME(**options).load(data) if isinstance(p, Problem)]


def test_the_prompt_follows_the_clips_and_is_the_benchmarks_own() -> None:
    sample = samples()[0]
    assert sample.prompt == "<video>" * 4 + ASK
    assert sample.question == ASK


def test_subtitles_of_sampled_frames_precede_the_question() -> None:
    asked = {s.id: s for s in samples(subtasks=["with-subtitles"])}
    listed = "This video's subtitles are listed below:\n"
    assert asked["with-subtitles/001-1"].question == f"{listed}It begins.\nIt ends here.\n{ASK}"
    assert asked["with-subtitles/003-1"].question == f"{listed}Hello.\nIt ends here.\n{ASK}"  # no font tags
    assert asked["with-subtitles/002-1"].question == ASK  # 156 of the 900 videos have no subtitles
    every = samples(subtasks=["with-subtitles"], num_frames=16, limit=1)[0].question
    assert every.startswith(f"{listed}It begins.\nIt ends here.\n")  # "Unseen" falls between two frames


def test_frames_are_evenly_spread_over_consecutive_clips() -> None:
    clips = [p.source for p in samples(limit=1)[0].parts if isinstance(p, Video)]
    assert [clip.indices for clip in clips] == [(0, 2), (4, 6), (9, 11), (13, 15)]
    assert [clip.seconds[0] for clip in clips] == [0.0, 2.0, 4.5, 6.5]
    assert all(len(clip.frames) == 2 for clip in clips)
    assert [clip.duration for clip in clips] == [2.0] * 4  # each its share of the 8 s
    (one,) = samples(limit=1, clips=1, num_frames=3)[0].parts
    assert isinstance(one, Video) and one.source.indices == (0, 8, 15)
    per_second = samples(limit=1, fps=1.0, clips=1)[0].parts[0]
    assert isinstance(per_second, Video) and len(per_second.source.frames) == 8
    pieces = split(per_second.source, 3)
    assert [len(piece.frames) for piece in pieces] == [2, 3, 3]
    assert [i for piece in pieces for i in piece.indices] == list(per_second.source.indices)
    assert len(split(one.source, 9)) == 3


def test_a_response_scores_by_its_first_capital_a_to_d() -> None:
    task, sample = VideoMME(), samples()[2]  # the answer is C
    right = ["C", "C. Blue.", "The best answer is: C", "(C)"]
    wrong = ["Best answer: C", "D, not C", "blue", "", "None"]
    assert [task.score(r, sample) for r in right + wrong] == [1.0] * 4 + [0.0] * 5


def test_accuracy_is_grouped_per_setting() -> None:
    task = VideoMME(subtasks=BOTH)
    asked = samples(subtasks=BOTH)
    said = {s.id: "A" if s.task == "without-subtitles" else str(s.answer) for s in asked}
    said["without-subtitles/003-3"] = "blue"
    summary = task.summarize([Answered(s, said[s.id], task.score(said[s.id], s)) for s in asked])
    # "blue" is no answer to the benchmark's own script, which divides by the answered: 3 of 8, not of 9
    answered_only = pytest.approx(3 / 8)
    assert (summary.official, summary.how) == (
        answered_only,
        "accuracy without subtitles, of the answered",
    )
    assert (summary.mean, summary.n) == (pytest.approx(2 / 3), 18)
    groups = {(g.by, g.label): (g.score, g.n) for g in summary.groups}
    third = pytest.approx(1 / 3)
    assert groups["overall", "without-subtitles"] == (answered_only, 8)
    assert groups["overall, of all asked", "without-subtitles"] == (third, 9)
    assert groups["overall", "with-subtitles"] == groups["overall, of all asked", "with-subtitles"]
    for label in ("short", "medium"):
        assert groups["duration, without-subtitles", label] == (third, 3)
    assert groups["duration, without-subtitles", "long"] == (pytest.approx(0.5), 2)
    assert groups["domain, without-subtitles", "Knowledge"] == (third, 6)
    assert groups["sub_category, without-subtitles", "Travel"] == (pytest.approx(0.5), 2)
    assert groups["task_type, without-subtitles", "Counting Problem"] == (pytest.approx(0.6), 5)
    assert groups["task_type, with-subtitles", "Object Recognition"] == (1.0, 3)
    assert groups["extraction", "no option letter (counted wrong)"] == (0.0, 1)


def test_results_are_json_of_the_official_template(tmp_path: Path) -> None:
    task = VideoMME(subtasks=BOTH)
    answered = [Answered(s, "C. Blue.", task.score("C", s)) for s in samples(subtasks=BOTH)]
    task.write_predictions(answered, tmp_path)
    paths = [tmp_path / f"video-mme-{setting}.json" for setting in BOTH]
    assert set(tmp_path.iterdir()) == set(paths)
    videos = json.loads(paths[0].read_text())
    assert [len(v["questions"]) for v in videos] == [3, 3, 3]
    assert list(videos[0]) == ["video_id", "duration", "domain", "sub_category", "questions"]
    assert videos[0]["questions"][0] == {
        "question_id": "001-1",
        "task_type": "Counting Problem",
        "question": "Which colour is frame 1?",
        "options": ["A. Red.", "B. Lime.", "C. Blue.", "D. Yellow."],
        "answer": "A",
        "response": "C. Blue.",
    }


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("row", "what"),
    [
        (mme_row(videoID="gone"), "no video {data}/gone with any of .mp4, .MP4, .mkv"),
        (mme_row() | {"question": None}, "question is None, no text"),
        (mme_row(duration="tiny"), "duration 'tiny' is none of short, medium, long"),
        (mme_row(options=["A. Red.", "B. Lime."]), "options are ['A. Red.', 'B. Lime.'], not four texts"),
        (mme_row(answer="E"), "answer 'E' is not a letter A to D"),
        (mme_row(answer=None), "answer is None, no text"),
        (mme_row(question_id="002-1"), "without-subtitles/002-1 occurs twice"),
    ],
)
def test_a_bad_row_is_named_and_skipped_and_the_others_are_asked(
    tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    data = changed(tmp_path, mme_row(2, 1), row, mme_row(3, 1))
    expected = what.format(data=data / "data")
    where = f"{data / 'videomme/test-00000-of-00001.parquet'}:row 1"
    assert problems(data) == [f"{where}: {expected}; skipped"]
    assert [s.meta["question_id"] for s in samples(data)] == ["002-1", "003-1"]
