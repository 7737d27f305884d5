"""The page holds what the results hold."""

from __future__ import annotations

import json

import pytest

from lab.speed import document
from lab.speed.settings import Settings
from lab.speed.table import GOALS, Result, Section, goal
from lab.speed.timing import Spread


def made(name, **cells):
    rows = ({"tokens": 256, "ms": Spread(1.5, 1.0, 2.0), **cells},)
    sections = (
        Section("Figures", rows),
        Section(GOALS, (goal("quick", 3.0, most=2.0), goal("wide", 0.9, least=0.8))),
    )
    settings = Settings("tiny", layers=2)
    return Result(
        name, settings, {}, sections, {"processor": "P", "threads": 1}, "abc", ("a note",)
    ).to_json()


PAGE = "# Head\n\nwords\n\n<!-- goals -->\nold\n<!-- /goals -->\nmore\n<!-- store -->\n<!-- /store -->\nend\n"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setattr(document.importlib, "import_module", lambda name: object())
    return document.rendered(PAGE, {"store-tiny.json": made("store")})


def test_only_what_is_marked_is_written(page):
    assert page.startswith("# Head\n\nwords\n\n<!-- goals -->\n") and page.endswith("<!-- /store -->\nend\n")
    assert "old" not in page and "more\n<!-- store -->" in page


def test_figures_notes_and_goals_are_there(page):
    figures = page[page.index("<!-- store -->") :]
    assert "**Figures (tiny, 2 layers, bfloat16)**" in figures
    assert "| tokens | ms |\n|---|---|\n| 256 | 1.5 |" in figures and "* a note\n" in figures
    assert "quick" not in figures  # goals have a table of their own
    link = "[store-tiny](speed/store-tiny.json)"
    assert f"| quick | ≤ 2 | 3 | **not met** | tiny, 2 layers, bfloat16 | {link} |" in page
    assert f"| wide | ≥ 0.8 | 0.9 | met | tiny, 2 layers, bfloat16 | {link} |" in page


def test_writing_twice_changes_nothing(page, monkeypatch):
    assert document.rendered(page, {"store-tiny.json": made("store")}) == page


def test_a_changed_figure_changes_the_page(page):
    assert document.rendered(page, {"store-tiny.json": made("store", extra=7)}) != page


def test_a_part_that_nothing_fills_is_named():
    with pytest.raises(ValueError, match="part 'magic'"):
        document.rendered("<!-- magic -->\n<!-- /magic -->\n", {})


def test_the_committed_page_holds_the_committed_results():
    held = document.PAGE.read_text(encoding="utf-8")
    assert document.rendered(held, document.load(document.FOLDER)) == held


def test_every_committed_result_is_in_the_page_with_its_command():
    held = document.PAGE.read_text(encoding="utf-8")
    for path in document.FOLDER.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert f"(speed/{path.name})" in held, path.name
        assert f"`{result['command']}`" in held, path.name
        assert f"<!-- {result['benchmark']} -->" in held, path.name
