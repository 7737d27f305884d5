"""Plans from traces: what recurred, what it saves, and nothing that is not in the file."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest

from kamera.compile.mine import Recurrence, forming_tokens, placed_windows, recurring_windows
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


def test_windows_of_the_same_chunks_are_one_where_the_order_is_free(trace):
    path = trace(*filled("abc"), *filled("cab"), *filled("bca"), *filled("abd"))
    # events of one window: each time something leaves, what was in view is a window
    assert [found.chunks for found in recurring_windows(path)] == [("a", "b")]
    given, placed, length = placed_windows(path)
    assert ["".join(window) for window in given] == ["abc", "cab", "bca", "abd"]
    assert [set(window) for window in placed] == [set(window) for window in given]
    assert len(set(placed[:3])) == 1 and {placed[0][:2], placed[3][:2]} == {("b", "a")}
    assert forming_tokens(given, length) == 20 + 30 + 10 + 20 + 30 + 10 + 40
    assert forming_tokens(placed, length) == 10 + 30 + 40
    [found] = recurring_windows(path, place=True)
    assert (found.chunks, found.times, found.forming_tokens) == (("b", "a", "c"), 3, 10 + 30)
    assert found.saved_tokens == 4 * 10 + 3 * 30
    assert recurring_windows(path, place=True, stored="ab")[0].chunks == ("b", "a")


def test_placed_windows_never_take_more_than_the_given_and_few_take_the_least(trace):
    draw, gains = random.Random(0), []
    for _ in range(40):
        windows = ["".join(draw.sample("abcde", draw.randint(2, 4))) for _ in range(3)]
        path = trace(*[replace(line(w, 0), window=str(i)) for i, w in enumerate(windows)])
        given, placed, length = placed_windows(path)
        path.unlink()
        least = min(
            forming_tokens(orders, length)
            for orders in itertools.product(*[[*itertools.permutations(w)] for w in windows])
        )
        cost = forming_tokens(placed, length)
        assert [set(window) for window in placed] == [set(window) for window in windows]
        assert least <= cost <= forming_tokens(given, length)
        gains.append((forming_tokens(given, length) - cost, forming_tokens(given, length) - least))
    assert sum(ours for ours, _ in gains) > 0.8 * sum(best for _, best in gains) > 0


def test_survivors_and_leading_chunks_want_no_patch(trace):
    slid = [line("bc", 2, "slide"), line("b", 1, "evict")]
    assert recurring_windows(trace(*slid, *slid, line("a"), line("a"))) == []


def test_the_most_saving_windows_are_chosen_within_the_budget(trace):
    lines = [each for chunks in ("ab", "cd", "de") for each in filled(chunks) * 2]
    assert [m.chunks for m in recurring_windows(trace(*lines))] == [tuple("de"), tuple("cd"), tuple("ab")]
    assert [m.chunks for m in recurring_windows(trace(*lines), top=2)] == [tuple("de"), tuple("cd")]
    assert [m.chunks for m in recurring_windows(trace(*lines), tokens=70)] == [tuple("de"), tuple("ab")]


@pytest.mark.parametrize("bad", ["{}", "7", "no json", '{"format": 1}', "wrong", "other"])
def test_a_file_that_is_no_trace_is_refused_by_line(trace, bad):
    path = trace(line("a"))
    good = line("ab").to_json()
    spoilt = {"wrong": good.replace('"length":10', '"length":"10"'), "other": good.replace(":1,", ":2,", 1)}
    path.write_text(path.read_text() + spoilt.get(bad, bad) + "\n" + good + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: .* is not a window's operation"):
        recurring_windows(path)
