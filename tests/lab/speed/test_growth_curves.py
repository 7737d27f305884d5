"""Growth is told by curves that are computed from the figures, and by profiles whose shares add up."""

from __future__ import annotations

import json
import math

import pytest

from lab.speed.growth import PROFILED, STORES, WINDOWS, exponent, pivot, run
from lab.speed.plots import draw, points
from lab.speed.profile import PACKAGE, Entry, steps
from tests.lab.speed.beds import SMALL, deck


@pytest.fixture(scope="module")
def document():
    return json.loads(json.dumps(run(SMALL).to_json()))


def rows(document, title):
    return next(s["rows"] for s in document["sections"] if s["title"] == title)


@pytest.mark.slow
def test_every_operation_and_look_up_has_a_figure_at_every_size(document):
    assert [r["operation"] for r in rows(document, WINDOWS)] == [m.name for m in deck(2).moves()]
    for title, sizes in ((WINDOWS, [2, 4]), (STORES, [30, 60])):
        for row in rows(document, title):
            assert [size for size, *_ in points(row)] == sizes
            assert all(0.0 < low <= middle <= high < math.inf for _, middle, low, high in points(row))


def test_an_exponent_is_that_of_the_curve():
    assert exponent({4: 3.0, 8: 3.0, 64: 3.0}) == pytest.approx(0.0)
    assert exponent({4: 2.0, 16: 8.0, 64: 32.0}) == pytest.approx(1.0)
    assert exponent({1: 5.0, 100: 50.0}) == pytest.approx(0.5)


def test_a_table_says_how_much_more_the_largest_size_costs():
    flat = [{"what": "fork", "n": 4, "ms": 2.0}, {"what": "fork", "n": 64, "ms": 3.0}]
    (row,) = pivot(flat, "what", "n", "ms")
    assert row["4"] == 2.0 and row["64"] == 3.0
    assert row["at 16 times the size"] == 1.5
    assert row["grows as"] == pytest.approx(math.log(1.5) / math.log(16))
    assert pivot(flat[:1], "what", "n", "ms") == [{"what": "fork", "4": 2.0}]


@pytest.mark.slow
def test_a_profiles_steps_are_kameras_and_do_not_overlap(document):
    for name in PROFILED:
        found = rows(document, f"Where {name} spends its time in a window of 4 chunks")
        assert found and all(row["step"].startswith("kamera/") for row in found)
        assert all(row["ms"] > 0.0 and row["calls"] > 0.0 for row in found)
        assert sum(row["share"] for row in found) <= 1.01
        assert [row["ms"] for row in found] == sorted((row["ms"] for row in found), reverse=True)


def test_a_steps_share_has_foreign_calls_but_no_other_steps():
    outer, inner = (f"{PACKAGE}/window/a.py", 1, "outer"), (f"{PACKAGE}/ops/b.py", 1, "inner")
    torch, mapped = ("/x/torch/c.py", 1, "matmul"), ("~", 0, "<built-in method map>")
    entries = {
        outer: Entry(1, 1, 1.0, 10.0, {}),
        mapped: Entry(1, 1, 0.5, 6.5, {outer: (1, 1, 0.5, 6.5)}),
        inner: Entry(3, 3, 2.0, 6.0, {mapped: (3, 3, 2.0, 6.0)}),
        torch: Entry(4, 4, 6.5, 6.5, {inner: (3, 3, 4.0, 4.0), outer: (1, 1, 2.5, 2.5)}),
    }
    assert steps(entries) == {outer: pytest.approx(4.0), inner: pytest.approx(6.0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["growth.svg", "growth.png"])
def test_the_plot_is_one_small_file(document, tmp_path, name):
    pytest.importorskip("matplotlib")
    draw(document, tmp_path / name)
    assert 5_000 < (tmp_path / name).stat().st_size < 200_000


def test_only_a_growth_result_is_drawn(tmp_path):
    with pytest.raises(ValueError, match="'window' is no result"):
        draw({"benchmark": "window"}, tmp_path / "x.svg")
    assert not (tmp_path / "x.svg").exists()
