"""Plans from traces: what recurred, what it saves, and nothing that is not in the file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, permutations

import pytest

from kamera.compile import read_plan
from kamera.compile.mine import Recurrence, plan_text, recurring_windows
from kamera.compile.plan import ById
from kamera.errors import TraceError
from kamera.window import Event
from tests.window.told import event, slot, write_trace

TOKENS = {"a": 10, "b": 20, "c": 30, "d": 40, "e": 50}


def line(chunks: str, placed: int | None = None, operation: str = "append", anchor: str = "a0") -> Event:
    """An operation after which the window has these chunks, those from index ``placed`` on placed anew."""
    placed = len(chunks) - 1 if placed is None else placed
    after = [slot(c, i, length=TOKENS[c]) for i, c in enumerate(chunks)]
    if placed == len(chunks):
        return event(operation, after, after, anchor=anchor)
    if placed == len(chunks) - 1:
        return event("append", after[:-1], after, concerns=after[-1], anchor=anchor)
    before = [*after[:placed], *(replace(s, number=s.number + 100) for s in after[placed:])]
    return event("reorder", before, after, anchor=anchor)


@pytest.fixture
def trace(tmp_path):
    return partial(write_trace, tmp_path / "trace.jsonl")


def filled(chunks: str) -> list[Event]:
    """A window that was filled chunk by chunk."""
    return [line(chunks[: i + 1]) for i in range(len(chunks))]


def test_what_recurred_is_a_window_and_its_worth_is_its_arrivals(trace):
    path = trace(*filled("abc"), *filled("abc"), *filled("abd"))
    # b came behind a three times, c behind ab twice, d behind ab once
    assert recurring_windows(path) == [
        Recurrence(("a", "b", "c"), 2, saved_tokens=3 * 20 + 2 * 30, forming_tokens=50)
    ]
    assert [m.chunks for m in recurring_windows(path, times=1)] == [tuple("abc"), tuple("abd")]
    assert recurring_windows(path, times=3) == [Recurrence(("a", "b"), 3, 60, 20)]
    assert recurring_windows(path, times=4) == []


def test_what_a_window_brings_with_it_is_not_counted_again(trace):
    path = trace(*filled("abc"), *filled("abc"), *filled("abd"), *filled("abd"))
    first, second = recurring_windows(path)
    assert first == Recurrence(tuple("abd"), 2, saved_tokens=4 * 20 + 2 * 40, forming_tokens=60)
    assert second == Recurrence(tuple("abc"), 2, saved_tokens=2 * 30, forming_tokens=30)


def test_survivors_and_leading_chunks_want_no_patch(trace):
    slid = [line("bc", 2, "slide"), line("b", 1, "evict")]
    assert recurring_windows(trace(*slid, *slid, line("a"), line("a"))) == []


def test_a_reorder_wants_patches_from_the_first_moved_chunk_on(trace):
    moved = line("acb", 1, "reorder")
    assert recurring_windows(trace(moved, moved)) == [
        Recurrence(tuple("acb"), 2, saved_tokens=100, forming_tokens=50)
    ]


def test_the_most_saving_windows_are_chosen_within_the_budget(trace):
    lines = [each for chunks in ("ab", "cd", "de") for each in filled(chunks) * 2]
    assert [m.chunks for m in recurring_windows(trace(*lines))] == [tuple("de"), tuple("cd"), tuple("ab")]
    assert [m.chunks for m in recurring_windows(trace(*lines), top=2)] == [tuple("de"), tuple("cd")]
    assert [m.chunks for m in recurring_windows(trace(*lines), tokens=70)] == [tuple("de"), tuple("ab")]


def test_the_plan_does_not_depend_on_the_order_of_the_lines(trace):
    runs = [filled("abc"), filled("abc"), filled("abd"), filled("abd"), filled("ae")]
    plans = {tuple(recurring_windows(trace(*chain.from_iterable(order)))) for order in permutations(runs)}
    assert len(plans) == 1


def test_a_window_ends_where_a_chunk_is_gone(trace):
    path = trace(*filled("abc") * 2)
    assert recurring_windows(path, stored={"a", "b"}) == [Recurrence(("a", "b"), 2, 40, 20)]
    assert recurring_windows(path, stored={"b", "c"}) == []


def test_several_prompts_have_to_be_told_apart(trace):
    path = trace(*filled("ab") * 2, line("cd", anchor="b7"), line("cd", anchor="b7"))
    with pytest.raises(ValueError, match=r"chooses 2 system prompts .* a0 \(4 operations\), b7 \(2"):
        recurring_windows(path)
    assert [m.chunks for m in recurring_windows(path, anchor="b")] == [tuple("cd")]
    with pytest.raises(ValueError, match="'zz' chooses 0"):
        recurring_windows(path, anchor="zz")


@pytest.mark.parametrize("bad", ["{}", "7", "no json", '{"format": 1}', "wrong", "other"])
def test_a_file_that_is_no_trace_is_refused_by_line(trace, bad):
    path = trace(line("a"))
    good = line("ab").to_json()
    spoilt = {"wrong": good.replace('"length":10', '"length":"10"'), "other": good.replace(":1,", ":2,", 1)}
    path.write_text(path.read_text() + spoilt.get(bad, bad) + "\n" + good + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: .* is not a window's operation"):
        recurring_windows(path)


def test_a_line_that_is_being_written_is_left_out(trace):
    path = trace(*filled("ab") * 2)
    path.write_text(path.read_text() + '{"time": 1.0, "oper')
    assert [m.chunks for m in recurring_windows(path)] == [tuple("ab")]


def test_the_plan_reads_as_one(trace, tmp_path):
    path = tmp_path / "plan.jsonl"
    path.write_text(plan_text(recurring_windows(trace(*filled("ab") * 2)), "You watch a camera."))
    (window,) = read_plan(path).windows
    assert (window.system, window.chunks) == ("You watch a camera.", (ById("a"), ById("b")))
    path.write_text(plan_text(recurring_windows(trace(*filled("ab") * 2)), None))
    assert read_plan(path).windows[0].system is None


@pytest.mark.parametrize("name", ["times", "top", "tokens"])
def test_limits_must_be_counts(trace, name):
    with pytest.raises(ValueError, match=f"{name} 0"):
        recurring_windows(trace(line("a")), **{name: 0})
