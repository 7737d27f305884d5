"""How a command starts: help imports nothing heavy, and says what each verb says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "numpy", "rich.console", "PIL", "sqlite3"}


@pytest.mark.few(2)
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
