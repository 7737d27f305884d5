"""Heat maps and plots: what stands in a cell is what was scored there."""

import json
import math

import pytest
from PIL import Image

from kamera.cli.output import nan_to_null
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.registry import make_task
from kamera.eval.tasks.report import results_of_run
from kamera.eval.tasks.sample import Answered, TaskSample
from kamera.eval.trial import Trial
from lab.task_plots import draw, heat_map, read_results

pytestmark = pytest.mark.lab

ARMS = {"reprefill": "oak", "blind": "elm"}


def results(*places, task=None):
    """Of one question per (context length, depth)."""
    answered = {
        arm: [
            Answered(
                TaskSample(
                    *(f"x/{i}", "retrieval-text-val", (), "Which?", "oak", ()),
                    {
                        "context_length": length,
                        "placed_depth": depth,
                        "question_id": i,
                        "question": "Which?",
                        "metric": "needle",
                    },
                ),
                said,
                float(said == "oak"),
            )
            for i, (length, depth) in enumerate(places)
        ]
        for arm, said in ARMS.items()
    }
    trials = [Trial(a.sample.id, arm, a.response) for arm in ARMS for a in answered[arm]]
    return results_of_run(task or MMNiah(), answered, trials, ())


def test_a_heat_map_has_depths_down_and_lengths_across():
    found = results((500, 0.1), (1500, 0.5), (9000, 0.99), (9000, 0.0))
    lengths, scores = heat_map(found.arm("reprefill"))
    assert lengths == ("<1k", "1k", "8k") and len(scores) == 5
    asked = {(y, x): s for y, row in enumerate(scores) for x, s in enumerate(row) if not math.isnan(s)}
    assert asked == {(0, 0): 1.0, (2, 1): 1.0, (4, 2): 1.0, (0, 2): 1.0}
    assert {s for row in heat_map(found.arm("blind"))[1] for s in row if not math.isnan(s)} == {0.0}


def test_figures_are_drawn_of_what_there_is(tmp_path):
    files = draw(results((1500, 0.5), (9000, 0.99)), tmp_path / "plots")
    assert [file.name for file in files] == ["arms.png", "heatmap.png", "lengths.png"]
    for file in files:
        with Image.open(file) as image:
            assert image.width > 200 and len(image.convert("RGB").getcolors(1 << 20)) > 5
    wide, narrow = (Image.open(tmp_path / "plots" / f"{name}.png").width for name in ("heatmap", "arms"))
    assert wide > narrow  # a panel per arm
    assert [file.name for file in draw(results((500, 0.5)), tmp_path / "short")] == [
        "arms.png",
        "heatmap.png",
    ]
    assert draw(results(), tmp_path / "none") == []


def test_other_benchmarks_have_arms_and_no_heat_map(tmp_path):
    task = make_task("egoschema")
    item = TaskSample("egoschema/1", "subset", (), "Which?", 1, ("A. oak", "B. elm"), {"q_uid": "1"})
    answered = {arm: [Answered(item, said, 0.0)] for arm, said in ARMS.items()}
    found = results_of_run(task, answered, [Trial("egoschema/1", arm, "A") for arm in ARMS], ())
    assert [file.name for file in draw(found, tmp_path)] == ["arms.png"]


def test_results_come_back_from_the_document_of_the_command():
    found = results((1500, 0.5), (9000, 0.99))
    again = read_results(json.loads(json.dumps(nan_to_null(found.document()))))
    assert repr(again.arms) == repr(found.arms)  # nan is equal to nothing
    assert (again.task, again.items, again.labelled) == (found.task, found.items, found.labelled)
