"""The page in a browser: by keyboard, on narrow screens, in the dark, and with hostile text."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kamera.window import Outcome
from kamera.window.view import page
from tests.window.told import event, slot
from tests.window.view.browsing import chromium
from tests.window.view.test_story import walk

HOSTILE = """</script x></script><img src=x onerror="window.hit=1"><!--data--><!-- & ' \u2028"""


class Elements(HTMLParser):
    """Names of the elements of a page, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_data(self, data):
        if self.names[-1:] == ["script"] and data.strip():
            self.scripts.append(data)


def hostile():
    return [replace(each, session=HOSTILE, report=renamed(each.report)) for each in walk()]


def renamed(report):
    slots = tuple(replace(s, label=HOSTILE + s.chunk_id) for s in report.slots)
    return replace(report, slots=slots, notes=(HOSTILE,))


def test_a_hostile_text_is_data_and_ends_no_element():
    made = page(hostile(), title=HOSTILE)
    parsed = Elements(made)
    assert "img" not in parsed.names and parsed.names.count("script") == 2
    data = json.loads(parsed.scripts[0])
    assert data["lives"][0]["name"] == data["title"] == HOSTILE
    assert data["lives"][0]["lanes"][0][1].startswith(HOSTILE)
    assert made.count("://") == 1  # the name of SVG


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def look(browser, tmp_path):
    """Opens a page; afterwards it must have asked for nothing else and thrown nothing."""
    tabs, asked, errors = [], [], []

    def opened(made: str, width: int = 1280, height: int = 800, scheme: str = "light"):
        path = tmp_path / "page.html"
        path.write_text(made, encoding="utf-8")
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda line: errors.append(line.text))
        tab.goto(path.as_uri())
        tabs.append(tab)
        return tab

    yield opened
    for tab in tabs:
        tab.close()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def long(count: int):
    """Many frames under a window of six."""
    slots, told = [], []
    for i in range(count):
        before, slots = slots, slots[-5:]
        new = slot(f"{i:08x}", i, start=10 * len(slots))
        outcomes = [Outcome("kept")] * len(slots) + [Outcome("prefilled", 10, "new")]
        slots = [*slots, new]
        told.append(event("append", before, slots, outcomes=outcomes, concerns=new, time=float(i)))
    return told


def test_the_headline_is_what_ran_and_what_others_would_have_run(look):
    tab = look(page(walk()))
    assert tab.locator("#bars .value").all_inner_texts() == ["30", "50 1.7×", "115 3.8×"]
    assert "5 operations on 3 chunks" in tab.locator("#when").inner_text()
    assert tab.locator("#reasons td").all_inner_texts() == ["seen for the first time", "3", "30"]
    assert "50 B" in tab.locator("#patches").inner_text()
    legend = tab.locator("#legend").inner_text()
    assert all(word in legend for word in ("exact", "patched", "survivor")) and "blind" not in legend


def test_arrows_choose_an_operation_and_the_panel_tells_it(look):
    tab = look(page(walk()))
    tab.focus("#grid")
    said = {}
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight"):
        tab.keyboard.press(key)
        said[key] = tab.locator("#detail h3").inner_text()
    assert said == {
        "Home": "1. append",
        "ArrowRight": "5. recall",
        "ArrowLeft": "2. append",
        "End": "5. recall",
    }
    text = tab.locator("#detail").inner_text()
    assert "still knows frame a" in text and "rank 4" in text
    before = tab.locator("#lanes").bounding_box()
    tab.keyboard.press("-")
    assert tab.locator("#lanes").bounding_box() == before  # narrower columns, the same picture frame


@pytest.mark.parametrize("width", [360, 768, 1024])
def test_a_narrow_screen_scrolls_up_and_down_alone(look, width):
    tab = look(page(long(40)), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("#lanes text").count() > 10


def test_a_hostile_text_is_shown_as_text(look):
    tab = look(page(hostile(), title=HOSTILE))
    tab.focus("#grid")
    tab.keyboard.press("End")
    assert tab.evaluate("window.hit") is None
    assert HOSTILE.split("<!--")[0] in tab.locator("h1").inner_text()
    assert "</script><img src=x" in tab.locator("#detail").inner_text()
    assert "</script><img src=x" in tab.locator("#lanes").text_content()
    assert tab.locator("img").count() == tab.locator("#detail .chunk img").count() == 1
