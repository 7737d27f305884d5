"""Run the program in this process, as a shell would see it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from kamera.cli import main

Program = Callable[[Sequence[str]], int]


class Run(NamedTuple):
    """Exit code and what was written."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as the one JSON document it must be."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def kamera(capsys: pytest.CaptureFixture[str], *arguments: object) -> Run:
    """``kamera ARGUMENTS…``"""
    return run(capsys, main, *arguments)


def run(capsys: pytest.CaptureFixture[str], program: Program, *arguments: object) -> Run:
    """Any program of this kind: ``main`` of `kamera.cli`."""
    capsys.readouterr()
    code = program([str(a) for a in arguments])
    return Run(code, *capsys.readouterr())


def files(folder) -> dict:
    """Every file under a folder and its bytes, SQLite's own aside."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and "sqlite" not in p.name}
