"""How a command starts: help imports nothing heavy, and says what each verb says of itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kamera.cli.app import EVAL, STORE, VERBS
from kamera.cli.lazy import Verb
from kamera.cli.store_quarantine import QUARANTINE
from tests.cli.run import kamera

HEAVY = {"torch", "transformers", "numpy", "rich.console", "PIL", "sqlite3"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["store", "--help"], ["eval", "--help"], ["nonsense"]]
)
def test_help_and_bad_usage_import_nothing_heavy(arguments):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kamera", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert {"typer", "kamera", "kamera.cli.app"} <= imported
    assert imported & HEAVY == set()


def _verbs(verbs: Mapping[str, Verb]) -> Iterator[tuple[str, Verb]]:
    for name, verb in verbs.items():
        yield pytest.param(name, verb, id=verb.where)


@pytest.mark.parametrize(("name", "verb"), [*_verbs(VERBS), *_verbs(STORE), *_verbs(EVAL)])
def test_the_list_says_of_a_verb_what_it_says_itself(name, verb):
    command = verb.load(name)
    assert command.name == name
    assert " ".join(command.help.split("\n\n")[0].split()) == verb.help


@pytest.mark.parametrize(
    ("group", "verbs"),
    [
        ([], VERBS),
        (["store"], STORE),
        (["store", "quarantine"], QUARANTINE),
        (["eval"], EVAL),
    ],
)
def test_help_cuts_no_sentence(capsys, group, verbs):
    out = " ".join(kamera(capsys, *group, "--help").out.split())
    for name, verb in verbs.items():
        said = " ".join(verb.help.split())
        assert f"{name} {said}" in out.replace("re- prefill", "re-prefill")


def test_public_names_are_imported_on_first_use():
    code = (
        "import sys, kamera; before = 'torch' in sys.modules; missing = [n for n in kamera.__all__ "
        "if n not in dir(kamera) or not hasattr(kamera, n)]; print(before, 'torch' in sys.modules, missing, "
        "hasattr(kamera, 'nonsense'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "False True [] False"
