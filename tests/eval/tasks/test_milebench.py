"""MileBench's loader, prompts and result files, on a small set in the published layout."""

import json
import shutil
from pathlib import Path

import pytest

from kamera.errors import TaskDataError
from kamera.eval.tasks.milebench import CODES, SUBTASKS, MileBench
from kamera.eval.tasks.sample import Answered, Picture, Problem, TaskSample

FIXTURE = Path(__file__).parent / "fixtures" / "milebench"
THERE = ("TQA", "TextNeedleInAHaystack", "GPR1200", "ALFRED")


def load(data, limit=None, subtasks=THERE):
    items = list(MileBench(subtasks).load(Path(data), limit))
    return [i for i in items if isinstance(i, TaskSample)], [i for i in items if isinstance(i, Problem)]


def pictures(sample):
    return [part.source.name for part in sample.parts if isinstance(part, Picture)]


@pytest.fixture
def data(tmp_path):
    return Path(shutil.copytree(FIXTURE, tmp_path / "set"))


def rewrite(data, name, change):
    file = data / "MileBench" / name / f"{name}.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return file


def test_the_tasks_are_the_published_ones():
    assert len(SUBTASKS) == 29 and len(CODES) == 11


def test_the_whole_set_loads_without_a_problem():
    samples, problems = load(FIXTURE)
    assert [s.id for s in samples] == [
        *("TQA/0", "TQA/1", "TextNeedleInAHaystack/0", "GPR1200/0", "ALFRED/0"),
    ]
    assert problems == []


@pytest.mark.parametrize("top", ["MLBench", "MileBench", "."])
def test_the_top_folder_may_be_old_or_the_data_folder(data, top):
    moved = data / "MileBench" if top == "." else (data / "MileBench").rename(data / top).parent
    assert len(load(moved)[0]) == 5


def test_a_choice_prompt_has_instruction_context_and_options():
    sample = load(FIXTURE)[0][0]
    assert sample.prompt == (
        "Using the diagrams, answer the query. Choose your answer from the Choice List.\n"
        "<image><image>Question: What produces ozone?\nChoice list: \nA. Sun\nB. Oxygen\nC. Hydrogen\n"
        "D. Carbon\nYour answer is: "
    )
    assert pictures(sample) == ["0.png", "1.png"]
    assert sample.head == 1 and MileBench().max_new_tokens(sample) == 512


def test_placeholders_name_their_image_whatever_their_order():
    assert pictures(load(FIXTURE)[0][1]) == ["1.png", "0.png"]


def test_gpr1200_lists_options_without_letters():
    sample = next(s for s in load(FIXTURE)[0] if s.task == "GPR1200")
    assert sample.prompt.endswith("\nChoice list: \nimage1\nimage2\nYour answer is: ")


def test_open_prompt_ends_with_the_context():
    needle, alfred = (load(FIXTURE)[0][i] for i in (2, 4))
    assert needle.question.endswith("Question: What is the special magic Budapest number?")
    assert alfred.question == " Current Step:"


def test_each_task_is_scored_its_own_way():
    tqa, _, needle, gpr, alfred = load(FIXTURE)[0]
    task = MileBench()
    assert task.score("B. Oxygen", tqa) == 1.0 and task.score("Answer: B", tqa) == 0.0
    assert task.score("It is 5,626,534", needle) == 1.0 and task.score("x5626534", needle) == 0.0
    assert task.score("image2", gpr) == 1.0
    assert 0.0 < task.score("Place tissue box on the toilet", alfred) < 1.0


def test_a_damaged_file_is_named_and_costs_only_its_dataset(data):
    file = data / "MileBench" / "TQA" / "TQA.json"
    file.write_text(file.read_text()[:-30])
    samples, (problem,) = load(data)
    assert len(samples) == 3 and problem.where.startswith(f"{file}:") and "broken JSON" in problem.what


def test_a_missing_image_is_named_and_skipped(data):
    (data / "MileBench" / "ALFRED" / "images" / "s2.jpg").unlink()
    samples, (problem,) = load(data)
    assert len(samples) == 4 and "'s2.jpg'" in problem.what
    assert problem.where.endswith("ALFRED.json:data[0]")


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda r: r["task_instance"].update(context="{image#3} Question"), "placeholder 3 for 2 images"),
        (lambda r: r["task_instance"].update(context="{image#0} Question"), "placeholder 0 for 2 images"),
        (lambda r: r.update(task_instruction_id=4), "task_instruction_id 4 of 1"),
        (lambda r: r.update(response="Neon"), "'Neon' is none of its choices"),
        (lambda r: r["task_instance"].pop("choice_list"), "without choice_list"),
        (lambda r: r.update(sample_id="x"), "sample_id 'x'"),
        (lambda r: r.pop("task_instance"), "task_instance"),
    ],
)
def test_a_record_that_cannot_be_asked_is_skipped(data, change, said):
    file = rewrite(data, "TQA", lambda document: change(document["data"][0]))
    samples, (problem,) = load(data)
    assert len(samples) == 4 and problem.where == f"{file}:data[0]" and said in problem.what


def test_an_image_nobody_points_at_is_remarked_on(data):
    rewrite(data, "TQA", lambda document: document["data"][0]["task_instance"]["images_path"].append("0.png"))
    samples, (problem,) = load(data)
    assert len(samples) == 5 and not problem.skipped and "2 placeholders for 3 images" in problem.what


def test_unknown_types_tasks_and_names_are_refused(data):
    rewrite(data, "TQA", lambda document: document["meta_data"].update(question_type="essay"))
    (data / "MileBench" / "ALFRED").rename(data / "MileBench" / "BERTA")
    (data / "MileBench" / "BERTA" / "ALFRED.json").rename(data / "MileBench" / "BERTA" / "BERTA.json")
    problems = load(data)[1]
    assert [p.what for p in problems] == [
        "unknown task",
        "question_type 'essay' is neither multi-choice nor open-ended",
        "no such file",
    ]
    with pytest.raises(ValueError, match="'BERTA'"):
        MileBench(["BERTA"])


def test_a_code_names_its_datasets():
    assert MileBench(["S-2", "DocVQA"]).subtasks == ("SlideVQA", "OCR-VQA", "DocVQA")


def test_a_folder_without_the_layout_is_refused(tmp_path):
    with pytest.raises(TaskDataError, match="no MileBench datasets"):
        load(tmp_path)


def test_official_score_is_the_mean_of_codes():
    answered = [Answered(s, "said", float(s.task == "TQA")) for s in load(FIXTURE)[0]]
    summary = MileBench().summarize(answered)
    # TQA is one of four codes, and two of five samples
    assert summary.official == pytest.approx(1 / 4) and summary.mean == pytest.approx(2 / 5)
    assert {(g.by, g.label): g.n for g in summary.groups}[("images", "Few")] == 5


def test_result_files_are_those_of_the_official_tools(tmp_path):
    task = MileBench()
    samples = load(FIXTURE)[0]
    answered = [Answered(s, "B", task.score("B", s)) for s in samples]
    task.write_predictions(answered, tmp_path / "blind")
    predictions = json.loads((tmp_path / "blind" / "TQA" / "pred.json").read_text())
    assert [p["sample_id"] for p in predictions] == [0, 1]
    assert set(predictions[0]) == {
        *("sample_id", "image", "question", "gt_response", "gen_model_id", "pred_response", "gen_kwargs"),
    }
    assert "<ImageHere><ImageHere>Question" in predictions[0]["question"]
    evaluation = json.loads((tmp_path / "blind" / "TQA" / "eval.json").read_text())
    assert evaluation["Accuracy"] == 0.5
    assert evaluation["image_quantity_level-Result"] == {"Few": [1.0, 2], "Medium": [0, 0], "Many": [0, 0]}
    scores = json.loads((tmp_path / "blind" / "TQA" / "eval_score.json").read_text())
    assert scores == [{"id": "0", "score": "1"}, {"id": "1", "score": "0"}]
    rouge = json.loads((tmp_path / "blind" / "ALFRED" / "eval.json").read_text())
    assert "Rouge-L f" in rouge
