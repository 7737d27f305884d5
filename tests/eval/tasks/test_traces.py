"""Samples behind histories: their windows, what is counted, and whether wrong patches are seen."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera import Backbone, testbed
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.asking import TaskAsker
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.report import collect
from kamera.eval.tasks.run import run_task
from kamera.eval.tasks.sample import Answered, Passage, Picture, TaskSample, digest
from kamera.eval.tasks.traces import CONTEXTS, LEAST, TRACES, traced, traces_named
from kamera.eval.trial import Trial
from kamera.testbed.benchmarks import write_mm_niah


@pytest.fixture(scope="module")
def backbone():
    return Backbone(*testbed.load())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mm_niah(tmp_path_factory.mktemp("data"), episodes=2, questions=1, layouts=("LLLI",))


def niah():
    return MMNiah(("reasoning-text",), bare=True)


def made(pictures: int, head: bool) -> TaskSample:
    """Pictures with captions behind an instruction, and a picture that belongs to the question."""
    parts = [Passage("Look.")] * head
    for i in range(pictures):
        parts += [Picture(f"{i}.png"), Passage(f"caption {i}")]
    return TaskSample("x/1", "x", (*parts, Picture("live.png", live=True)), "Which?", "a")


@given(pictures=st.integers(LEAST, 9), head=st.booleans())
def test_windows_hold_whole_units_each_once_and_the_published_window_comes_last(pictures, head):
    sample = made(pictures, head)
    size = pictures + head
    after = {trace.meta["trace"]: trace for trace in traced(sample, TRACES)}
    assert tuple(after) == TRACES
    for name, trace in after.items():
        assert (trace.id, trace.meta["item"], trace.parts) == (f"x/1/{name}", "x/1", sample.parts)
        every = [*trace.parts, *trace.others]
        for window in trace.before:
            assert len(set(window)) == len(window)
            shown = [every[i] for i in window]
            assert not any(part.live for part in shown)
            for part, behind in zip(shown, [*shown[1:], None], strict=True):
                assert not isinstance(part, Picture) or behind == Passage(f"caption {part.source[0]}")
    whole = tuple(range(2 * pictures + head))
    published, slid = after["published"].before, after["slid"].before
    assert published == (whole,) and sorted(after["shuffled"].before[0]) == list(whole)
    assert after["shuffled"].before[0] != whole and after["shifted"].before[0][1:] == whole
    first = [*after["slid"].parts, *after["slid"].others][slid[0][0]]
    assert first.twin and set(slid[0][2:]) == set(whole[:-2])
    assert [len(after[f"recalled@{t}"].before) for t in ("0", "0.5", "1")] == [2, 3, 3]
    assert len(after["contexts"].before) == CONTEXTS - 1
    assert all(window[-2:] == whole[-2:] for window in after["contexts"].before)
    assert size == len({i for window in published for i in window}) - pictures
    assert {t.before for t in traced(sample, ["slid"])} == {slid}, "equal samples, equal traces"


def test_a_context_that_shows_too_little_has_no_history_and_names_are_known():
    assert list(traced(made(LEAST - 1, True), TRACES)) == []
    assert [t.meta["trace"] for t in traced(made(LEAST, True), traces_named(["slid"]))] == ["slid"]
    assert traces_named(["all"]) == TRACES
    with pytest.raises(ValueError, match="trace 'danced' is none of published, shuffled"):
        traces_named(["danced"])


def test_another_history_is_another_sample():
    (slid,) = traced(made(4, False), ["slid"])
    assert len({digest(s) for s in (slid, replace(slid, before=()), replace(slid, others=()))}) == 3


class Places:
    """Notes the windows that it is given."""

    rehearsed = False

    def __init__(self, desk):
        self.units, self.windows = {}, []

    def encode(self, unit):
        self.units[unit.name] = unit.content

    def place(self, order):
        self.windows.append([self.units[name] for name in order])

    def ask(self, query):
        raise ValueError("noted")


def shown(item):
    return item["text"] if item["type"] == "text" else np.asarray(item["image"])


def test_an_arm_is_given_these_windows_and_twins_in_other_colours(backbone, data):
    sample = next(s for s in niah().load(data) if isinstance(s, TaskSample))
    (slid,) = traced(sample, ["slid"])
    noted = []

    def make(desk):
        noted.append(Places(desk))
        return noted[0]

    (trial,) = TaskAsker(backbone, niah(), testbed.SYSTEM, None).trials(slid, {"places": make})
    assert trial.error == "ValueError: noted"
    before, last = ([shown(item) for (item,) in window] for window in noted[0].windows)
    assert [v for v in last if isinstance(v, str)] == [p.text for p in slid.parts if isinstance(p, Passage)]
    assert len(before) == len(last)
    twin = next(i for i in slid.before[0] if i >= len(slid.parts))
    true = next(
        i for i, p in enumerate(slid.parts) if replace(slid.others[twin - len(slid.parts)], twin=False) == p
    )
    assert (before[0] == last[true][..., [2, 0, 1]]).all() and (before[0] != last[true]).any()
    stayed = [v for v in before[2:] if not isinstance(v, str)]
    assert all((a == b).all() for a, b in zip(stayed, last[::2], strict=False))


@pytest.fixture(scope="module")
def run(backbone, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    options = {"arms": ("reprefill", "blind", "patch@16", "keep"), "traces": ("published", "slid")}
    return run_task(backbone, niah(), data, out, **options), out


def test_a_patch_answers_behind_every_trace_and_blind_reuse_does_not(run):
    results, out = run
    assert results.items == results.labelled == 4 and not [p for p in results.problems if p.skipped]
    assert results.arm("reprefill").summary.mean == results.arm("patch@16").summary.mean == 1.0
    assert results.arm("blind").agreement < 0.5 and results.arm("patch@16").flip_recover == 1.0
    by = [cell.by for cell in results.arm("blind").summary.groups]
    assert by.count("trace") == by.count("trace, agreement") == 2
    (path,) = (out / "predictions" / "patch@16").glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 2, "the published window alone is the benchmark's"


def test_more_traces_are_added_to_a_run(backbone, data, run):
    _, out = run
    lines = (out / "items.jsonl").read_bytes()
    options = {"arms": ("reprefill", "blind"), "traces": ("slid", "swapped")}
    results = run_task(backbone, niah(), data, out, **options)
    assert results.items == 4 and (out / "items.jsonl").read_bytes().startswith(lines)
    assert len((out / "items.jsonl").read_text().splitlines()) == 4 * 4 + 2 * 2


def answered(says):
    """Hand-made answers: ``says(item, trace, arm)`` is True for the right one."""
    task, first = niah(), FirstToken.of(torch.tensor([4.0, 0.0, 0.0]))
    items = [
        replace(made(3, False), id=f"x/{i}", meta={"context_length": 5, "placed_depth": 0.1}) for i in (0, 1)
    ]
    given, trials = {}, []
    for arm in ("reprefill", "blind", "patch@4", "random-patch@4", "other-patch@4"):
        given[arm] = []
        for sample in (s for item in items for s in traced(item, ("published", "slid"))):
            right = says(int(sample.meta["item"][-1]), sample.meta["trace"], arm)
            response = "a b" if right else "nonsense"
            sample = replace(sample, answer="b")
            given[arm].append(Answered(sample, response, task.score(response, sample)))
            logits = torch.tensor([4.0, 0.0, 0.0] if right else [0.0, 4.0, 0.0])
            trials.append(Trial(sample.id, arm, response, first.again(logits)))
    return collect(task, given, trials, ())


def test_scores_are_counted_against_the_reference():
    wrong = {(0, "slid", "blind"), (1, "slid", "blind"), (1, "slid", "patch@4")}
    results = answered(lambda *case: case not in wrong)
    blind, patched = results.arm("blind"), results.arm("patch@4")
    assert results.arm("reprefill").agreement == 1.0 and results.arm("reprefill").first_token_kl == 0.0
    assert blind.agreement == 0.5 and patched.agreement == patched.summary.mean == 0.75
    assert patched.flip_recover == 0.5  # one of the two that blind changed
    cells = {(c.by, c.label): c.score for c in blind.summary.groups}
    assert cells["trace, agreement", "slid"] == 0.0 and cells["trace", "published"] == 1.0
    assert (patched.interval.low, patched.interval.high) == (0.5, 1.0)  # of two items, not of four answers
    assert math.isnan(answered(lambda *_: True).arm("patch@4").flip_recover)


def test_sabotage_that_passes_is_told():
    results = answered(lambda item, trace, arm: arm != "random-patch@4")
    assert results.unseen == (("other-patch@4", "patch@4"),)
    assert results.document()["unseen"] == [["other-patch@4", "patch@4"]]
