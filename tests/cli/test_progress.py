"""A verb that runs long says how far it is, also where stderr is no terminal."""

from __future__ import annotations

import json

import pytest

from kamera.cli import output
from kamera.cli.output import Output
from tests.cli.run import kamera


def test_a_demo_in_a_pipe_tells_each_step_and_ends_with_a_picture_and_a_page(capsys, tmp_path):
    page = tmp_path / "demo.html"
    done = kamera(capsys, "demo", "--clips", "1", "--questions", "1", "--view", page)
    assert done.code == 0
    assert max(len(line.rstrip()) for line in done.out.replace(str(page), "").splitlines()) <= 80
    assert "milliseconds until the window is ready" in done.out and "█" in done.out
    assert f"page: {page}" in done.out and "kamera doctor MODEL" in done.out
    data = json.loads(page.read_text("utf-8").partition('id="data">')[2].partition("</script>")[0])
    assert [life["name"] for life in data["lives"]] == ["survivor", "repair"]
    assert all(len(life["lanes"]) == 6 and len(life["deeds"]) == 14 for life in data["lives"])
    lines = done.err.splitlines()
    assert lines[0].startswith("0 of 6 operations, ")
    assert "0 of 6 operations, clip 1 of 1: append" in lines
    assert "5 of 6 operations, clip 1 of 1: reorder" in lines
    assert len(set(lines)) == len(lines)
    assert "\r" not in done.err


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    with Output().progress_callback("object") as tell:
        for done in range(4):
            tell(done, 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1 of 3 objects", "2 of 3 objects", "3 of 3 objects"]


@pytest.mark.parametrize("quiet", [True, False])
def test_what_ends_at_once_says_nothing(capsys, quiet):
    with Output(quiet=quiet).progress_callback("object") as tell:
        tell(3, 3)
    assert capsys.readouterr().err == ""
