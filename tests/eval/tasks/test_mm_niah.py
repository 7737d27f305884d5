"""MM-NIAH's loader, prompts and result files, on a small set in the published layout."""

import json
import shutil
from pathlib import Path

import pytest

from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.sample import Answered, Picture, Problem, TaskSample

FIXTURE = Path(__file__).parent / "fixtures" / "mm_niah"
PHRASE = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


def load(data, limit=None, **options):
    items = list(MMNiah(**options).load(Path(data), limit))
    return [i for i in items if isinstance(i, TaskSample)], [i for i in items if isinstance(i, Problem)]


def pictures(sample):
    return [part.source.name for part in sample.parts if isinstance(part, Picture)]


@pytest.fixture
def data(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "set"))


def annotations(data, subtask):
    return data / "mm_niah_val" / "annotations" / f"{subtask}.jsonl"


def rewrite(data, subtask, change):
    file = annotations(data, subtask)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    change(records)
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_the_whole_set_loads_without_a_problem():
    samples, problems = load(FIXTURE)
    assert len(samples) == 7 and problems == []
    assert len({s.id for s in samples}) == 7
    assert samples[0].where.endswith("retrieval-text.jsonl:1")


def test_text_prompt_is_context_newline_question_and_instruction():
    (sample, _), _ = load(FIXTURE, subtasks=["retrieval-text"])
    assert sample.prompt == (
        "Review of V19 <image> The interface varies. The mystery unveils a banana. The new tool <image> lets "
        "you view parts.\nWhat does the mystery unveil?" + PHRASE
    )
    assert sample.question == "What does the mystery unveil?" + PHRASE
    assert pictures(sample) == ["000001.jpg", "000002.jpg"]


def test_image_choices_stand_last_with_letters():
    (sample,), _ = load(FIXTURE, subtasks=["retrieval-image"])
    assert pictures(sample)[2:] == [f"choice{i}.jpg" for i in range(4)]
    assert sample.prompt.endswith("document?\nA. <image>\nB. <image>\nC. <image>\nD. <image>" + LETTER)
    assert sample.question == LETTER and MMNiah().max_new_tokens(sample) == 16


def test_text_choices_stand_behind_letters():
    (sample,), _ = load(FIXTURE, subtasks=["reasoning-image"])
    assert sample.prompt.endswith(
        "the video?\nA. The camera is moving left.\nB. The camera is moving right." + LETTER
    )
    assert "</s>" in sample.prompt


@pytest.mark.parametrize(
    "place", ["mm_niah_val/images", "mm_niah_val/mm_niah_dev/images", "mm_niah_dev/images"]
)
def test_images_are_found_wherever_the_tarball_was_unpacked(data, place):
    images = data / "mm_niah_val" / "mm_niah_dev" / "images"
    (data / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(images, data / "away")
    shutil.move(data / "away", data / place)
    samples, problems = load(data)
    assert len(samples) == 7 and problems == []


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda r: r.update(context=r["context"] + "<image>"), "3 <image> placeholders for 2 images"),
        (lambda r: r["meta"].update(choices=["a", "an <image>"]), "3 <image> placeholders for 2 images"),
        (lambda r: r["meta"].update(choices=["a"], choices_image_path=["b"]), "both given"),
        (lambda r: r["meta"].update(placed_depth=[]), "placed_depth"),
        (lambda r: r["meta"].update(context_length="long"), "context_length"),
        (lambda r: r.pop("question"), "'question' is missing"),
        (lambda r: r.update(images_list=[1, 2]), "images_list"),
        (lambda r: r.update(answer={"a": 1}), "not a choice, list or text"),
    ],
)
def test_a_record_that_cannot_be_asked_is_skipped(data, change, said):
    file = rewrite(data, "retrieval-text", lambda records: change(records[0]))
    samples, (problem,) = load(data)
    assert len(samples) == 6 and problem.where == f"{file}:1" and said in problem.what


def answered(correct=("retrieval-text-val/0", "reasoning-image-val/9")):
    samples, _ = load(FIXTURE)
    return [Answered(s, "said", float(s.id in correct)) for s in samples]


def test_only_the_official_score_bins_by_length_and_depth():
    task = MMNiah()
    summary = task.summarize(answered())
    assert summary.mean == pytest.approx(2 / 7) and summary.n == 7
    # one right sample of six subtasks, in the 1k bin, in one of five rows; the other is below 1k
    assert summary.official == pytest.approx(0.2 / 6 / 11, abs=1e-6)
    assert "1 below 1k" in summary.how
    cells = {g.label: (g.score, g.n) for g in summary.groups if g.by == "length and depth"}
    assert cells["1k, depth 0.0-0.2"] == (1.0, 1) and cells["<1k, depth 0.2-0.4"] == (1.0, 1)


def test_predictions_are_what_the_official_scorer_reads(tmp_path):
    task = MMNiah()
    task.write_predictions(answered(), tmp_path / "blind")
    names = [file.name for file in (tmp_path / "blind").rglob("*.json*")]
    assert "blind_counting-text-val.jsonl" in names and "scores_val.json" in names
    line = json.loads((tmp_path / "blind" / "blind_retrieval-text-val.jsonl").read_text().splitlines()[0])
    assert line == {
        "question_id": 0,
        "question": "What does the mystery unveil?",
        "answer": "banana",
        "response": "said",
        "context_length": 1023,
        "placed_depth": [0.062],
    }
    scores = json.loads((tmp_path / "blind" / "results" / "scores_val.json").read_text())
    assert scores["retrieval-text-val"] == [0.2] + [0.0] * 10
    assert scores["overall"][0] == pytest.approx(0.2 / 6, abs=1e-6)
    assert scores["context_ranges"][0] == "1k"
