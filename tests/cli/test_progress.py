"""A verb that runs long says how far it is, also where stderr is no terminal."""

from __future__ import annotations

import pytest

from kamera.cli import output
from kamera.cli.output import Output
from tests.cli.run import kamera


def test_a_demo_in_a_pipe_tells_each_step(capsys):
    done = kamera(capsys, "demo", "--clips", "1", "--questions", "1")
    assert done.code == 0
    lines = done.err.splitlines()
    assert lines[0].startswith("0 of 6 operations, ")
    assert "0 of 6 operations, clip 1 of 1: append (slides by itself)" in lines
    assert "5 of 6 operations, clip 1 of 1: reorder" in lines
    assert len(set(lines)) == len(lines)
    assert "\r" not in done.err


def test_a_quiet_demo_says_nothing_else(capsys):
    done = kamera(capsys, "demo", "--clips", "1", "--questions", "1", "--quiet", "--format", "json")
    assert (done.code, done.err) == (0, "")
    assert done.document["clips"] == 1


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    with Output().counted("object") as tell:
        for done in range(4):
            tell(done, 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1 of 3 objects", "2 of 3 objects", "3 of 3 objects"]


@pytest.mark.parametrize("quiet", [True, False])
def test_what_ends_at_once_says_nothing(capsys, quiet):
    with Output(quiet=quiet).counted("object") as tell:
        tell(3, 3)
    assert capsys.readouterr().err == ""
