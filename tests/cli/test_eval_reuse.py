"""``kamera eval reuse``: from items to a scored submission."""

from __future__ import annotations

import json

import pytest

from kamera.cli.eval_reuse import ARMS
from kamera.eval.reuse import arms_named, schema
from tests.cli.run import kamera


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    from tests.eval.reuse.rig import small

    return small(tmp_path_factory.mktemp("reuse") / "bench", traces=("slid",)).folder


def test_a_benchmark_is_frozen_run_and_scored(capsys, bench, tmp_path):
    arms = ("--arms", "exact,blind, patch@16,nothing", "--arm-module", "tests.cli.arm_module")
    path = tmp_path / "mine.json"
    arms = (*arms, "--submission", path, "--dtype", "float32")
    run = kamera(capsys, "eval", "reuse", "run", bench, *arms, "--format", "json")
    (found,) = run.document["submissions"]
    rows = {row["arm"]: row for row in found["rows"] if row["trace"] == "all"}
    assert list(rows) == ["exact", "blind", "patch@16", "nothing"]
    assert rows["exact"]["agreement"]["mean"] == rows["nothing"]["agreement"]["mean"] == 1.0
    assert rows["patch@16"]["rehearsed"] and rows["blind"]["recomputed"] == 0.0 < rows["exact"]["recomputed"]
    assert found["system"]["kv_bytes_per_token"] > 0

    scored = kamera(capsys, "eval", "reuse", "score", bench, path, "--format", "json")
    assert scored.document["submissions"][0]["rows"] == found["rows"]
    shown = kamera(capsys, "eval", "reuse", "score", bench, path, "--view", tmp_path / "v.html")
    page = (tmp_path / "v.html").read_text(encoding="utf-8")
    assert page.index("<b>blind</b>") < page.index("<b>exact</b>")  # by what they run
    assert f'aria-label="accuracy {rows["exact"]["accuracy"]["mean"]:.2f}' in page
    assert "patch@16 (rehearsed)" in shown.out and "agreement by trace" in shown.out


def test_the_testbed_is_frozen_from_the_command_line(capsys, tmp_path):
    freeze = ("eval", "reuse", "freeze", "testbed", "--items", "2", "--seed", "3", "--out")
    made = kamera(capsys, *freeze, tmp_path / "a", "--format", "json").document
    again = kamera(capsys, *freeze, tmp_path / "b", "--format", "json").document
    assert made["digest"] == again["digest"] and (made["items"], made["questions"]) == (2, 18)
    assert json.loads((tmp_path / "a" / "benchmark.json").read_text())["origin"]["seed"] == 3
    assert kamera(capsys, *freeze, tmp_path / "a").code == 1


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("run", "BENCH", "--arms", "exact,magic"), 2, "'magic' is none of exact, native, blind, prefix"),
        (("run", "BENCH", "--arms", "blind"), 2, "give exact"),
        (("run", "BENCH", "--arm-module", "no.such"), 2, "'no.such' cannot be imported"),
        (("run", "BENCH", "--arm-module", "json"), 2, "'json' has no ARMS"),
        (("run", "nowhere"), 1, "no benchmark here"),
        (("freeze", "tv", "--out", "x"), 2, "'tv' is none of testbed"),
        (("freeze", "ovo-bench", "--out", "x"), 2, "needs --data"),
    ],
)
def test_bad_usage_is_one_line(capsys, bench, arguments, code, said):
    run = kamera(capsys, "eval", "reuse", *(str(bench) if a == "BENCH" else a for a in arguments))
    assert run.code == code and said in run.err and run.err.count("\n") == 1


def test_a_submission_of_another_form_is_refused(capsys, bench, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    run = kamera(capsys, "eval", "reuse", "score", bench, tmp_path / "x.json")
    assert run.code == 1 and "is a required property" in run.err


def test_the_schema_is_printed_and_the_arms_are_the_librarys(capsys):
    assert kamera(capsys, "eval", "reuse", "schema").document == schema()
    assert list(arms_named(ARMS.split(","))) == ARMS.split(",")
