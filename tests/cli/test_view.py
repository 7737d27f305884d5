"""kamera view: a trace, a saved window or session becomes a page."""

from __future__ import annotations

import json

import pytest

from tests.cli.run import kamera
from tests.window.told import write_trace
from tests.window.view.test_story import walk


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_trace(tmp_path / "walk.jsonl", *walk())


def data_of(path) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_a_trace_becomes_a_page_that_is_named(capsys, trace, tmp_path):
    done = kamera(capsys, "view", trace)
    assert (done.code, done.out, done.err) == (0, "walk.html\n", "5 operations\n")
    assert [len(life["deeds"]) for life in data_of(tmp_path / "walk.html")["lives"]] == [5]
    done = kamera(capsys, "view", trace, "--output", tmp_path / "x.html", "--title", "<b>", "-q")
    assert (done.out, done.err) == (f"{tmp_path / 'x.html'}\n", "")
    assert "<title>&lt;b&gt;" in (tmp_path / "x.html").read_text()
    done = kamera(capsys, "view", trace, "--format", "json")
    assert done.document == {"source": str(trace), "page": "walk.html", "operations": 5}
