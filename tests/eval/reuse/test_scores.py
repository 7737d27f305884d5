"""Scores of hand-made answers, and the schema that a rival's answers must meet."""

from __future__ import annotations

import json
import math

import pytest
import torch
from jsonschema import Draft202012Validator

from kamera.errors import TaskDataError
from kamera.eval.first_token import FirstToken
from kamera.eval.reuse import Submission, read_submission, schema, score_submission
from kamera.eval.trial import Trial
from tests.eval.reuse.rig import small

SYSTEM = {"name": "n", "model": "m", "dtype": "d", "hardware": "h", "kv_bytes_per_token": 10}


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    return small(tmp_path_factory.mktemp("scored") / "bench", count=2)


def submitted(benchmark, says, **arms):
    """A submission in which ``says(item, trace, arm)`` gives the logits' best token and the answer's text."""
    lines = []
    for item in benchmark.items:
        for trace in item.traces:
            exact = FirstToken.of(torch.tensor([4.0, 0.0, 0.0]))
            for arm in arms:
                best, text = says(item, trace.name, arm)
                logits = torch.zeros(3)
                logits[best] = 4.0
                first = exact.again(logits)
                ttft = 2.0 if arm == "exact" else 0.5
                lines.append(Trial(item.id, trace.name, arm, text, first, 100, 25.0, 500, 1, ttft))
    return Submission(benchmark.digest, SYSTEM, arms, tuple(lines))


def wrong_when(*cases):
    """Right answers but for these (item index, trace, arm)."""

    def says(item, trace, arm):
        wrong = any(item.id.endswith(f"/{i}") and (trace, arm) == (t, a) for i, t, a in cases)
        return (1, "nonsense") if wrong else (0, str(item.answer))

    return says


def test_scores_are_counted_against_the_exact_arm(benchmark):
    says = wrong_when((0, "slid", "blind"), (1, "slid", "blind"), (1, "slid", "mine"))
    scores = score_submission(submitted(benchmark, says, exact=False, blind=False, mine=True), benchmark)
    assert scores.items == 2 and not scores.errors
    assert scores.row("exact").accuracy.mean == 1.0 and scores.row("exact").kl.mean == 0.0
    assert scores.row("blind").agreement.mean == 0.5 and scores.row("blind", "slid").agreement.mean == 0.0
    assert scores.row("mine").accuracy.mean == scores.row("mine").agreement.mean == 0.75
    assert scores.row("mine").flip_recover.mean == 0.5  # one of the two that blind changed
    assert math.isnan(scores.row("mine", "published").flip_recover.mean)
    p = torch.tensor([0.0, 4.0, 0.0]).log_softmax(-1)
    q = torch.tensor([4.0, 0.0, 0.0]).log_softmax(-1)
    assert scores.row("mine", "slid").kl.mean == pytest.approx(float((p.exp() * (p - q)).sum()) / 2)
    row = scores.row("mine")
    assert (row.recomputed, row.kept, row.ttft, row.rehearsed) == (0.25, 0.5, 0.25, True)


def test_sabotage_that_passes_is_told(benchmark):
    arms = {"exact": False, "patch@4": True, "random-patch@4": True, "other-patch@4": True}
    says = wrong_when(*((i, t, "random-patch@4") for i in (0, 1) for t in ("published", "slid")))
    scores = score_submission(submitted(benchmark, says, **arms), benchmark)
    assert {one.sabotage: one.caught for one in scores.sabotage} == {
        "random-patch@4": True,
        "other-patch@4": False,
    }


def test_a_line_with_an_error_counts_under_no_arm(benchmark):
    made = submitted(benchmark, wrong_when((0, "slid", "blind")), exact=False, blind=False)
    failed = Trial(benchmark.items[0].id, "slid", "blind", error="NotRelocatable: no")
    kept = [
        line for line in made.lines if (line.item, line.trace, line.arm) != (failed.item, "slid", "blind")
    ]
    scores = score_submission(Submission(made.benchmark, SYSTEM, made.arms, (*kept, failed)), benchmark)
    assert scores.row("exact").n == scores.row("blind").n == 3
    assert scores.errors == (f"{failed.item} / slid / blind: NotRelocatable: no",)


def test_a_submission_is_written_as_the_schema_says(benchmark, tmp_path):
    made = submitted(benchmark, wrong_when(), exact=False, mine=True)
    Draft202012Validator.check_schema(schema())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(made.document()))
    assert read_submission(path, benchmark) == made


def _without(lines, index):
    return lines[:index] + lines[index + 1 :]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda d: d.pop("system"), r"\$: 'system' is a required property"),
        (lambda d: d["lines"][0].update(ttft_seconds=0), r"\$.lines\[0\]"),
        (lambda d: d["lines"][0].pop("answer"), r"\$.lines\[0\]"),
        (lambda d: d["lines"][0].update(score=1.0), r"\$.lines\[0\]"),
        (lambda d: d.update(arms=[{"name": "mine", "rehearsed": True}]), r"\$.arms"),
        (lambda d: d.update(benchmark="0" * 64), "answers benchmark 000000000000"),
        (lambda d: d.update(lines=_without(d["lines"], 3)), "1 of 8 lines are missing, first"),
        (lambda d: d["lines"].append(d["lines"][0]), "answered twice"),
        (lambda d: d["lines"][0].update(trace="danced"), "is not asked in this benchmark"),
        (lambda d: d["lines"][1]["first_token"].update(ids=[2, 1, 0]), "lists other first tokens"),
    ],
)
def test_a_submission_that_breaks_a_rule_is_refused_in_one_line(benchmark, tmp_path, change, said):
    document = submitted(benchmark, wrong_when(), exact=False, mine=True).document()
    document = json.loads(json.dumps(document))
    change(document)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(TaskDataError, match=said) as refused:
        read_submission(path, benchmark)
    assert "\n" not in str(refused.value)
