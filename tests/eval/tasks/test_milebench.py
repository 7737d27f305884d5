"""MileBench's loader, prompts and result files, on a small set in the published layout."""

import json
import shutil
from pathlib import Path

import pytest

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


def test_each_task_is_scored_its_own_way():
    tqa, _, needle, gpr, alfred = load(FIXTURE)[0]
    task = MileBench()
    assert task.score("B. Oxygen", tqa) == 1.0 and task.score("Answer: B", tqa) == 0.0
    assert task.score("It is 5,626,534", needle) == 1.0 and task.score("x5626534", needle) == 0.0
    assert task.score("image2", gpr) == 1.0
    assert 0.0 < task.score("Place tissue box on the toilet", alfred) < 1.0


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
