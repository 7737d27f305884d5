"""The frozen benchmark as a task: its windows, its scores, and whether it sees wrong patches."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kamera import testbed
from kamera.content import load_image
from kamera.engines.hf import HfEngine
from kamera.eval.first_token import FirstToken
from kamera.eval.reuse import ReuseBench
from kamera.eval.tasks.asking import TaskAsker
from kamera.eval.tasks.journal import Journal
from kamera.eval.tasks.registry import make_task
from kamera.eval.tasks.report import results_of_run
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Answered
from kamera.eval.trial import Trial
from tests.eval.reuse.rig import small


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    return small(tmp_path_factory.mktemp("task") / "bench", count=2)


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def run(backbone, benchmark, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    arms = ("reprefill", "blind", "patch@16", "keep")
    options = {"arms": arms, "system": benchmark.system}
    return run_task(backbone, make_task("reuse"), benchmark.folder, out, **options), out


class Places:
    """Notes the windows that it is given."""

    rehearsed = False

    def __init__(self, desk):
        self.desk, self.units, self.windows = desk, {}, []

    def encode(self, unit):
        self.units[unit.name] = unit.content

    def place(self, order):
        self.windows.append([self.units[name] for name in order])

    def ask(self, query):
        raise ValueError("noted")


def words(window):
    return [[part.get("text") for part in content] for content in window]


def pixels(window):
    return [[part["image"].tobytes() for part in unit if part["type"] == "image"] for unit in window]


def test_a_sample_goes_through_the_windows_of_its_trace(backbone, benchmark):
    samples = {sample.id: sample for sample in ReuseBench().load(benchmark.folder)}
    assert list(samples) == [
        f"{item.sample.id}/{name}" for item in benchmark.items for name in ("published", "slid")
    ]
    for item in benchmark.items:
        for trace, windows in item.traces.items():
            noted = []

            def make(desk, noted=noted):
                noted.append(Places(desk))
                return noted[0]

            asker = TaskAsker(backbone, ReuseBench(), benchmark.system, None)
            (trial,) = asker.trials(samples[f"{item.sample.id}/{trace}"], {"places": make})
            assert trial.error == "ValueError: noted"
            units = [*item.sample.parts, *item.sample.others]
            true = [[asked_content(units[i]) for i in window] for window in windows]
            assert [words(w) for w in noted[0].windows] == [words(w) for w in true]
            assert [pixels(w) for w in noted[0].windows] == [pixels(w) for w in true]


def asked_content(picture):
    image = {"type": "image", "image": load_image(picture.source)}
    return [image, {"type": "text", "text": picture.caption}]


@pytest.mark.slow
def test_a_patch_answers_behind_every_trace_and_blind_reuse_does_not(run):
    results, out = run
    assert results.items == results.labelled == 4 and not results.problems
    assert results.arm("reprefill").summary.official == results.arm("patch@16").summary.official == 1.0
    assert results.arm("blind").agreement < 0.5 and results.arm("patch@16").flip_recover == 1.0
    by = [cell.by for cell in results.arm("blind").summary.groups]
    assert set(by) == {"trace", "subtask, agreement"} and by.count("trace") == 2
    lines = (out / "predictions" / "patch@16" / "reuse.jsonl").read_text().splitlines()
    assert [json.loads(line)["trace"] for line in lines] == ["published", "slid"] * 2
    assert Journal(out, json.loads((out / "run.json").read_text())["settings"]).trials


def answered(benchmark, says):
    """Hand-made answers: ``says(index of the item, trace, arm)`` is True for the right one."""
    task, first = ReuseBench(), FirstToken.of(torch.tensor([4.0, 0.0, 0.0]))
    made, trials = {}, []
    for arm in ("reprefill", "blind", "patch@4", "random-patch@4", "other-patch@4"):
        made[arm] = []
        for sample in task.load(benchmark.folder):
            right = says(int(sample.meta["item"].rsplit("/", 1)[1]), sample.task, arm)
            response = str(sample.answer) if right else "nonsense"
            made[arm].append(Answered(sample, response, task.score(response, sample)))
            logits = torch.tensor([4.0, 0.0, 0.0] if right else [0.0, 4.0, 0.0])
            trials.append(Trial(sample.id, arm, response, first.again(logits)))
    return results_of_run(task, made, trials, ())


def test_scores_are_counted_against_the_reference(benchmark):
    wrong = {(0, "slid", "blind"), (1, "slid", "blind"), (1, "slid", "patch@4")}
    results = answered(benchmark, lambda *case: case not in wrong)
    blind, patched = results.arm("blind"), results.arm("patch@4")
    assert results.arm("reprefill").agreement == 1.0 and results.arm("reprefill").first_token_kl == 0.0
    assert blind.agreement == 0.5 and patched.agreement == patched.summary.mean == 0.75
    assert patched.flip_recover == 0.5  # one of the two that blind changed
    cells = {(c.by, c.label): c.score for c in blind.summary.groups}
    assert cells["subtask, agreement", "slid"] == 0.0 and cells["trace", "published"] == 1.0
    assert (patched.interval.low, patched.interval.high) == (0.5, 1.0)  # of two items, not of four answers
    assert math.isnan(answered(benchmark, lambda *_: True).arm("patch@4").flip_recover)
