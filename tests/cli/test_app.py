"""Exit codes, errors in one line, and the two ways in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kamera as package
from kamera.errors import CorruptChunk
from tests.cli.run import kamera


def test_python_m_kamera_prints_the_version_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-m", "kamera", "--version"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kamera {package.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["doctor"],
        ["compile", "model"],
        ["doctor", "model", "--dtype", "int3"],
        ["doctor", "model", "--device", "nowhere"],
        ["doctor", "model", "--device", "cuda:97"],
        ["compile", "model", __file__, "--store", "memory://"],
        ["compile", "model", __file__, "--store", "s", "--rank", "0"],
        ["inspect", "x", "--format", "yaml"],
        ["inspect", "x", "--output", "/no/such/folder/file"],
        ["store", "ls", "x", "--limit", "0"],
    ],
)
def test_bad_usage_is_two_and_says_so_on_stderr(capsys, arguments):
    done = kamera(capsys, *arguments)
    assert done.code == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("error: kamera")


@pytest.mark.parametrize(
    "verb",
    [
        *("view no", "inspect no", "plan no p", "compile testbed no --store s", "serve testbed --keys no"),
        *("store ls no", "store stats no", "store gc no", "store pin no", "store export no s"),
        *("store import s no", "store convert no s", "eval merge no --out o"),
    ],
)
def test_a_path_where_nothing_is_is_bad_usage_of_every_verb(capsys, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    done = kamera(capsys, *verb.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1) and "no" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CorruptChunk("an object\nis damaged"), 1),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (ValueError("kind\n'x' is none"), 2),
    ],
)
def test_a_failure_is_one_line_and_no_traceback(capsys, monkeypatch, error, code):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr("kamera.cli.inspect.contents.read_object", fails)
    done = kamera(capsys, "inspect", __file__)
    assert (done.code, done.out) == (code, "")
    assert done.err == f"error: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize(
    "arguments", [["view", "t", "--output", "t"], ["plan", "t", "./t"], ["plan", "t", "p", "--output", "./t"]]
)
def test_no_result_replaces_what_is_read(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text("")
    done = kamera(capsys, *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and (tmp_path / "t").read_text() == ""
