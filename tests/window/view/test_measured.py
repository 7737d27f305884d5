"""A page of measurements in a browser: what it shows, on narrow screens, in the dark, with hostile text."""

from __future__ import annotations

import pytest

from kamera.trust import Estimate
from kamera.window.view import Measured, Way, measured_page
from tests.window.view.test_page import HOSTILE, Elements, browser, look

__all__ = ["browser", "look"]

NAN = Estimate(float("nan"), float("nan"), float("nan"))


def made(name: str = "keep") -> str:
    ways = (
        Way("exact", (Estimate(0.9, 0.8, 1.0), Estimate(1, 1, 1)), ("0e+00",), 100.0, "safe"),
        Way(name, (Estimate(0.5, 0.4, 0.6), None), ("1e-02",), 25.0, "unsafe", note=f"because {name}"),
        Way("none", (NAN, NAN), ("",), 0.0, "cannot tell"),
    )
    table = Measured(f"{name} and others", ("accuracy", "agreement"), ways, ("KL",), "recomputed, %")
    return measured_page(f"Page of {name}", {"model": name}, [table])


def test_a_way_has_its_cost_its_verdict_and_its_interval_in_place(look):
    tab = look(made())
    rows = tab.locator("tbody tr")
    assert [rows.nth(i).locator("b").inner_text() for i in range(3)] == ["exact", "keep", "none"]
    assert tab.locator(".chip").all_inner_texts() == ["safe", "unsafe", "cannot tell"]
    assert "because keep" in rows.nth(1).inner_text() and "1e-02" in rows.nth(1).inner_text()
    wide = [rows.nth(i).locator(".cost .fill").bounding_box()["width"] for i in range(3)]
    assert wide[0] == pytest.approx(4 * wide[1], rel=0.05) and wide[2] <= 2
    svg = rows.nth(0).locator("svg")
    assert svg.get_attribute("aria-label") == "accuracy 0.90 (0.80 to 1.00), agreement 1.00 (1.00 to 1.00)"
    places = [float(rows.nth(i).locator("circle").first.get_attribute("cx")) for i in range(2)]
    start, half, end = (float(x) for x in rows.nth(0).locator("line").evaluate_all(
        "lines => lines.slice(0, 3).map((line) => line.getAttribute('x1'))"
    ))  # fmt: skip
    assert places[0] == pytest.approx(start + 0.9 * (end - start), abs=0.2)
    assert places[1] == pytest.approx(half, abs=0.2)
    assert [rows.nth(i).locator("circle").count() for i in range(3)] == [
        2,
        1,
        0,
    ]  # what is not known is not drawn


def test_a_hostile_name_is_text_and_nothing_runs(look):
    page = made(HOSTILE)
    assert not {"img", "script", "iframe"} & set(Elements(page).names)
    tab = look(page)
    assert HOSTILE.split("<!--")[0] in tab.locator("h1").inner_text()
    assert "<img src=x" in tab.locator("tbody tr").nth(1).inner_text()
    assert tab.evaluate("window.hit") is None and "://" not in page


@pytest.mark.parametrize("width", [360, 1024])
def test_a_narrow_screen_scrolls_within_the_table(look, width):
    tab = look(made("a-name-without-any-space-in-it" * 3), width=width, scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(int(n) for n in colour.removeprefix("rgb(").removesuffix(")").split(",")) < 120
