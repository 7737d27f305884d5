"""Arms are compared by what the scorer reads in their answers, not by how these are worded."""

import pytest

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
