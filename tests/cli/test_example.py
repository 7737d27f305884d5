"""The example a user would copy runs as it stands."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.compile.saved import pictures, vision_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "compile_patches.py"


def run(monkeypatch, capsys, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return capsys.readouterr().out


def check(out: str, chunks: int) -> None:
    assert f"compiled {chunks} chunks: {chunks - 1} patches" in out
    costs = re.findall(r"as (\w+): (\d+) forwards, (\d+) vision encodes", out)
    assert costs == [("exact", "0", "0")] + [("patched", "0", "0")] * (chunks - 1)
    (compiling,) = re.findall(r"patches, (\d+) forwards", out)
    (all_compiling,) = re.findall(r"^all model work: to compile, (\d+) forwards", out, re.M)
    assert int(all_compiling) == int(compiling)


def test_it_runs_on_a_model_and_pictures_of_the_users(monkeypatch, capsys, tmp_path):
    names = [tmp_path / name for name in pictures(tmp_path, 3)]
    out = run(monkeypatch, capsys, "--model", vision_model(), "--images", *names, "--question", "hm?")
    check(out, 3)
    assert out.splitlines()[-2].startswith("hm? ")


@pytest.mark.slow
def test_it_runs_as_it_stands_on_the_shipped_backbone(monkeypatch, capsys):
    out = run(monkeypatch, capsys)
    check(out, 3)
    assert re.search(r"\? \w+ \(truth: \w+\)$", out, re.M)
