"""Each command of ``benchmarks`` in its quick form: it runs, and prints its table."""

from __future__ import annotations

import importlib
import json
import logging

import pytest

from benchmarks.speed import guard

TINY = ["--preset", "tiny", "--lengths", "32", "--chunks", "3", "--rounds", "1", "--seconds", "1"]
QUICK = {
    "price windows": ["windows", "--turns", "1", "--pictures", "2"],
    "price chats": ["chats", "--turns", "2", "--pictures", "1"],
    "speed apply": ["apply", *TINY],
    "speed window": ["window", *TINY],
    "speed serve": ["serve", *TINY],
    "serve load": ["load", "--clients", "2", "--requests", "3", "--rounds", "1"],
    "serve clients": ["clients", "--turns", "2", "--layers", "1"],
    "orders": ["--model", "testbed", "--documents", "1", "--chunks", "2", "--samples", "1"],
    "reliability": ["fuzz", "kills", "--size", "2"],
}


@pytest.fixture(autouse=True)
def logging_as_before():
    """A command may quieten Kamera's log for its process, which other tests share."""
    logger = logging.getLogger("kamera")
    level = logger.level
    yield
    logger.setLevel(level)


def shown(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """The document of a command."""
    command = importlib.import_module(f"benchmarks.{name.split()[0]}.__main__")
    assert not command.main([*arguments, "--format", "json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUICK)
def test_a_command_prints_rows_with_the_commit_and_the_machine(name, capsys):
    document = shown(name, QUICK[name], capsys)
    assert document["rows"] and {"command", "commit", "processor", "torch"} <= document.keys()


@pytest.mark.slow
def test_a_slide_costs_its_new_picture_where_a_prefix_cache_runs_the_window(capsys):
    rows = shown("price", QUICK["price windows"], capsys)["rows"]
    by = {(row["operation"], row["policy"]): row for row in rows}
    append, slide = by["append", "exact"], by["append, slide", "default"]
    assert append["first, tokens"] == append["prefix cache, tokens"] == slide["first, tokens"]
    assert slide["prefix cache, tokens"] > 1.5 * slide["first, tokens"]


@pytest.mark.slow
def test_claims_of_the_paper_change_with_a_broken_operator(capsys):
    """The shipped backbone keeps what it binds in values: a key that is not turned does not show in it."""
    sound, foreign = (
        shown("paper", ["--windows", "1", *more], capsys) for more in ([], ["--sabotage", "other-rows"])
    )
    holds, broken = ({row["claim"]: row["holds"] for row in d["rows"]} for d in (sound, foreign))
    served = "A fresh patch after recall (η)"
    assert holds["Blind reuse breaks multi-hop answers"] and holds[served]
    assert not broken[served]


def test_a_ratio_that_falls_is_told():
    held = {"apply: patched: times faster": 4.0, "gone": 1.0}
    rows, fallen = guard.compare(held, {"apply: patched: times faster": 2.1})
    assert fallen and [row["holds"] for row in rows] == [True, False]
    assert not guard.compare({"one": 4.0}, {"one": 2.0})[1] and guard.compare({"one": 4.0}, {"one": 1.9})[1]


def test_a_table_is_printed_for_people(capsys):
    command = importlib.import_module("benchmarks.reliability.__main__")
    assert command.main(["fuzz", "--size", "2"]) == 0
    said = capsys.readouterr().out
    assert "reads as written" in said and "must be" in said and "commit" in said


@pytest.mark.slow
def test_text_clients_with_rules_of_their_own_run_their_new_tokens_exact(capsys):
    rows = shown("price", ["clients", "--turns", "20"], capsys)["rows"]
    assert len(rows) == 5
    for row in rows:
        assert row["from the fourth turn on, of new"] <= 1.6
        assert row["first, tokens"] <= 0.5 * row["prefix cache"]
        assert row["background, tokens"] <= row["prefix cache"]
        assert row["turns over a prefix cache"] == 0
        assert row["logits, largest difference to plain"] <= 1e-3
