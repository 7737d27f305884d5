"""What fits a terminal of 80 columns: the help of every verb, and tables whose ids stay whole."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from kamera.cli.app import app
from kamera.cli.output import listing, print_tables
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


def _table(width: int) -> str:
    """The table as a terminal of this width shows it."""
    console = Console(file=io.StringIO(), width=width)
    print_tables(console, [listing("objects", list(COLUMNS), zip(*COLUMNS.values(), strict=True))])
    return console.file.getvalue()


def test_a_table_leaves_out_by_name_the_columns_that_do_not_fit():
    wide, narrow = _table(80), _table(52)
    assert "anchor" in wide and "too wide" not in wide
    assert "too wide for this terminal: anchor; see --format json" in " ".join(narrow.split())
    for number, shown in ((3, wide), (2, narrow)):
        assert all(shown.count(one) == number for one in IDS)


def test_a_column_that_is_empty_in_all_rows_is_not_shown():
    assert "rank" not in _table(80)
