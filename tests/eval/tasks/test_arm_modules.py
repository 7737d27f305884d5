"""Arms of other modules in a benchmark run, beside Kamera's own."""

from __future__ import annotations

import json

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.eval.arms import arms_of
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.run import run_task
from kamera.testbed.benchmarks import write_mm_niah
from tests.cli.run import kamera

MODULES = ("tests.cli.arm_module", "lab.baselines.windows")
ARMS = ("reprefill", "blind", "nothing", "first-k@10%", "recent@4")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mm_niah(tmp_path_factory.mktemp("data"), episodes=1, questions=2, layouts=("LLI",))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    backbone, task = HfEngine(*testbed.load()), MMNiah(("reasoning-text",), bare=True)
    results = run_task(backbone, task, data, out, arms=ARMS, others=arms_of(MODULES))
    return results, [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]


def test_an_arm_that_reuses_nothing_answers_as_the_reprefill(run):
    results, _ = run
    assert results.items == 2 and not results.skipped
    assert results.arm("nothing").agreement == 1.0 > results.arm("blind").agreement
    assert results.arm("nothing").first_token_kl < 1e-6 < results.arm("first-k@10%").first_token_kl


def test_an_arms_own_counts_are_in_its_lines(run):
    lines = {(line["item"], line["arm"]): line for line in run[1]}
    for id in {line["item"] for line in run[1]}:
        whole, part = lines[id, "nothing"], lines[id, "first-k@10%"]
        assert not whole["error"] and whole["window_tokens"] == lines[id, "reprefill"]["window_tokens"]
        # the document's units are pictures and captions; all but the first get a tenth of their tokens
        assert 0 < part["recomputed_tokens"] < 0.15 * whole["recomputed_tokens"]
        again = lines[id, "reprefill"]["recomputed_tokens"]
        assert whole["recomputed_tokens"] == again < whole["window_tokens"]
        assert lines[id, "recent@4"]["recomputed_tokens"] < whole["recomputed_tokens"]


def test_an_unknown_arm_names_those_that_exist(capsys, data, tmp_path):
    command = (
        "eval",
        "mm-niah",
        "--bare",
        "--data",
        data,
        "--out",
        tmp_path / "out",
        "--arms",
        "blind,cacheblend",
    )
    alone = kamera(capsys, *command)
    assert alone.code == 2 and alone.err.count("\n") == 1
    assert "arm 'cacheblend' is none of reprefill, native, blind," in alone.err
    told = kamera(capsys, *command, "--arm-module", "lab.baselines.windows")
    assert told.code == 2 and "repair, cacheblend@15%, vlcache@2%" in told.err
    assert not (tmp_path / "out").exists()
