"""Arms are compared by what the scorer reads in their answers, not by how these are worded."""

import dataclasses
import math

import pytest

from kamera.cli.eval_tables import tables
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.registry import make_task
from kamera.eval.tasks.report import results_of_run
from kamera.eval.tasks.sample import Answered, TaskSample
from kamera.eval.trial import Trial

LETTERED = ("A. red", "B. blue", "C. lime", "D. grey")


def sample(answer, choices=(), task="reasoning-text-val", **meta):
    return TaskSample("x/1", task, (), "Which?", answer, choices, {"metric": "choice", **meta})


@pytest.mark.parametrize(
    "name, item, one, other",
    [
        ("mm-niah", sample(2, ("r", "b", "l", "g")), "C", "C. lime, as it was shown first"),
        ("mm-niah", sample([1, 2], task="counting-text-val"), "[1, 2]", "```json\n[1,2]\n```"),
        ("mm-niah", sample(None, task="counting-text-val"), "[1, 2]", '{"x": [1, 2]}'),
        ("mm-niah", sample("oak"), "An oak.", "oak"),
        ("milebench", sample("lime", ("red", "lime")), "B", "lime, I think"),
        ("muirbench", sample("C", ("red", "blue", "lime")), "C", "The answer is (C)"),
        ("video-mme", sample("C", LETTERED), "C", "The best answer is: C. Blue."),
        ("egoschema", sample(2, LETTERED), "C", "C. lime"),
    ],
)
def test_two_wordings_of_one_decision_agree(name, item, one, other):
    task = make_task(name)
    assert task.decision(one, item) == task.decision(other, item)
    assert task.decision(one, item) != task.decision("B" if name != "milebench" else "A", item)


def test_agreement_and_flip_recover_compare_decisions():
    task, item = make_task("muirbench"), sample("C", ("red", "blue", "lime"), answerable=True)
    item.meta.update(idx="1", counterpart_idx=None)
    said = {"reprefill": "C", "blind": "A", "patch@4": "The answer is (C)", "patch@1": "(A)"}
    answered = {arm: [Answered(item, text, task.score(text, item))] for arm, text in said.items()}
    results = results_of_run(task, answered, [Trial("x/1", arm, text) for arm, text in said.items()], ())
    assert [row.agreement for row in results.arms] == [1.0, 0.0, 1.0, 0.0]
    assert [row.flip_recover for row in results.arms] == [1.0, 0.0, 1.0, 0.0]


def gaps(**kls: list[float]) -> dict[str, list[Trial]]:
    """Trials by arm whose first tokens are so far from a re-prefill that is sure of one of two tokens."""
    found: dict[str, list[Trial]] = {}
    for arm, values in {"reprefill": [0.0] * 3, **kls}.items():
        for number, value in enumerate(values):
            # KL(p ‖ (1/2, 1/2)) = value at this p
            p = 0.5
            while p < 1 and math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p) < value:
                p += 1e-5
            told = FirstToken((0, 1), (math.log(p), math.log(1 - p)), None)
            found.setdefault(arm, []).append(Trial(f"x/{number}", arm, "A", first_token=told))
    return found


def results(**kls: list[float]):
    task, item, trials = make_task("egoschema"), sample(2, LETTERED), gaps(**kls)
    answered = {
        arm: [Answered(dataclasses.replace(item, id=t.item), t.answer, 1.0) for t in of_arm]
        for arm, of_arm in trials.items()
    }
    return results_of_run(task, answered, [t for of_arm in trials.values() for t in of_arm], ())


def test_eta_is_the_share_of_the_gap_that_an_arm_closes():
    made = results(blind=[0.2, 0.4, 0.1], good=[0.02, 0.04, 0.01], harmful=[0.4, 0.4, 0.6])
    found = {row.arm: row.eta for row in made.arms}
    assert found["reprefill"].mean == 1.0 and found["blind"].mean == 0.0
    assert found["good"].mean == pytest.approx(0.9, abs=1e-3)
    assert found["harmful"].mean == pytest.approx(-1.0, abs=1e-3)
    assert found["harmful"].low < -1.5 < -0.5 < found["harmful"].high  # of the items drawn in pairs
    assert made.document()["arms"][2]["eta"]["mean"] == found["good"].mean
    [header, *_] = [column.header for column in tables(made)[0].columns if column.header == "eta"]
    assert header == "eta"


def test_without_a_gap_there_is_no_eta():
    assert math.isnan(results(good=[0.1] * 3).arm("good").eta.mean)
    assert math.isnan(results(blind=[0.0] * 3, good=[0.1] * 3).arm("good").eta.mean)
