"""What fits a terminal of 80 columns: the help of every verb, and tables whose ids stay whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from kamera.cli.app import app
from tests.cli.run import kamera


def _verbs(command, path=()) -> Iterator[tuple[str, ...]]:
    yield pytest.param(path, command, id=" ".join(path) or "kamera")
    if isinstance(command, TyperGroup):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _verbs(command.get_command(context, name), (*path, name))


@pytest.mark.parametrize(("path", "command"), _verbs(get_command(app)))
def test_the_help_of_a_verb_is_whole_and_fits_80_columns(capsys, monkeypatch, path, command):
    monkeypatch.setenv("COLUMNS", "80")
    out = kamera(capsys, *path, "--help").out
    assert max(map(len, out.splitlines())) <= 80
    said = "".join(out.split())
    for text in (command.help, *(parameter.help for parameter in command.params)):
        assert "".join((text or "").split()) in said
    shown = set(re.sub(r"[],()]", " ", re.sub(r"-\n\s+", "-", out)).split())
    for parameter in command.params:
        if type(parameter.default) is str and parameter.default:  # of a list each name is whole
            assert set(parameter.default.split(",")) <= shown


IDS = [f"{number:012x}" for number in (1, 2)]
COLUMNS = {"key": IDS, "kind": ["canonical"] * 2, "rank": [None, None], "chunk id": IDS, "anchor": IDS}
