"""Windows of a trace in both orders: what each runs, out of what those before it left."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from kamera.compile.placing import place
from tests.cli.run import kamera
from tests.compile.test_mine import TOKENS, filled, line
from tests.window.told import write_trace


@pytest.fixture
def trace(tmp_path):
    return partial(write_trace, tmp_path / "trace.jsonl")


def runs(made) -> list[tuple]:
    return [
        ((p.arrived_forwards, p.arrived_tokens), (p.placed_forwards, p.placed_tokens), "".join(p.placed))
        for p in made
    ]


def test_a_window_that_comes_in_another_order_is_placed_in_the_first_one(trace):
    path = trace(*filled("abc"), line("c", 0), line("cb"), line("cba"))
    assert [window.arrived for window in place(path)] == [tuple("abc"), tuple("cba")]
    first = 3, TOKENS["a"] + TOKENS["b"] + TOKENS["c"]
    assert runs(place(path)) == [(first, first, "abc"), ((2, TOKENS["b"] + TOKENS["a"]), (0, 0), "abc")]


def test_a_slide_that_places_nothing_is_no_window(trace):
    path = trace(*filled("abc"), line("bc", 2, "slide"), line("bcd"), line("bcd", 3, "condition"))
    assert [window.arrived for window in place(path)] == [tuple("abc"), tuple("bcd")]


def test_what_a_store_holds_behind_the_same_anchor_counts(trace):
    def row(chunk: str, behind: str = "", anchor: str = "a0"):
        kind = "exact" if behind else "canonical"
        context = SimpleNamespace(anchor=anchor)
        return SimpleNamespace(kind=kind, chunk_id=chunk, antecedents=tuple(behind), context=context, base="")

    path = trace(*filled("ab"))
    rows = [row("a"), row("b"), row("a", "b")]
    assert runs(place(path, rows=rows)) == [((1, TOKENS["b"]), (0, 0), "ba")]
    elsewhere = [row("a"), row("b"), row("a", "b", anchor="b7")]
    assert runs(place(path, rows=elsewhere))[0][1] == (1, TOKENS["a"])  # b leads, the smaller one runs


def test_the_verb_prints_both_orders_and_their_sums(capsys, trace):
    path = trace(*filled("abc"), line("cba", 0))
    document = kamera(capsys, "plan", path, "--place", "--format", "json").document
    assert [w["placed"] for w in document["windows"]] == [["a", "b", "c"]] * 2
    assert document["total"]["arrived_forwards"] == 3 + 2 and document["total"]["placed_forwards"] == 3
    table = kamera(capsys, "plan", path, "--place")
    assert table.code == 0 and "placed forwards" in table.out
    sums = "5 arrived forwards, 90 arrived tokens, 3 placed forwards, 60 placed tokens"
    assert sums in " ".join(table.out.split())


def test_the_verb_writes_a_plan_or_places(capsys, trace, tmp_path):
    path = trace(*filled("ab"))
    for arguments in ((path,), (path, tmp_path / "plan", "--place")):
        done = kamera(capsys, "plan", *arguments)
        assert (done.code, "give a PLAN to write, or --place" in done.err) == (2, True)
    assert not (tmp_path / "plan").exists()


def test_a_trace_that_is_empty_places_nothing(capsys, trace):
    assert kamera(capsys, "plan", trace(), "--place", "--format", "json").document["windows"] == []
