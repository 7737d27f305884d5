"""An attack that finds something says so: in its figures, by its exit code, whatever became of a child."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from lab.reliability import __main__ as command
from lab.reliability import bombs, races
from lab.reliability.findings import Child, Findings


def test_findings_are_counted_by_kind_with_a_few_examples() -> None:
    found = Findings()
    for i in range(5):
        found.add("lost", f"slot {i}")
    found.add("torn", times=0)
    found.done["reads"] += 7
    other = Findings()
    other.learn(json.loads(json.dumps(found.told())))
    other.add("torn", "slot 9")
    figures = other.figures()
    assert (figures["findings"], figures["done"]) == (6, {"reads": 7})
    assert figures["found"]["lost"] == {"times": 5, "e.g.": ["slot 0", "slot 1", "slot 2"]}


@pytest.mark.parametrize(
    ("work", "how", "why"),
    [
        (lambda: [1], "returned", ""),
        (lambda: 1 / 0, "died", "ZeroDivisionError"),
        (lambda: os._exit(3), "died", "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died", "SIGKILL"),
        (lambda: time.sleep(60), "hung", "SIGALRM"),
        (lambda: len(bytearray(2**30)), "died", "MemoryError"),
    ],
)
def test_a_child_is_told_by_how_it_ends(work: Any, how: str, why: str) -> None:
    end = Child(work, 60 if how != "hung" else 0.2, memory=2**28).ended()
    assert end.how == how and why in end.why
    assert end.result == ([1] if how == "returned" else None)


@pytest.mark.parametrize("findings", [0, 2])
def test_the_command_fails_if_there_are_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], findings: int
) -> None:
    monkeypatch.setattr(races, "run", lambda size, seed: {"findings": findings})
    assert command.main(["races", "--size", "1", "--format", "json"]) == (1 if findings else 0)
    assert json.loads(capsys.readouterr().out)["results"] == {"findings": findings}


def test_a_wrong_answer_and_a_link_that_is_followed_would_show(tmp_path: Any) -> None:
    found = Findings()
    bombs._looked(tmp_path, "a look", lambda root: "another object", found)
    bombs._looked(tmp_path, "a look", lambda root: None, found)
    assert found.figures()["found"] == {"a look is wrong": {"times": 1, "e.g.": ["another object"]}}
