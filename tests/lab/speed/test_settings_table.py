"""What a run was asked, and how its figures are shown."""

from __future__ import annotations

import subprocess

import pytest
import torch

from lab.speed import kernel, machine
from lab.speed.settings import NAMES, Settings
from lab.speed.table import Section, goal, preset_line, shown
from lab.speed.timing import Spread


def test_the_command_names_what_is_not_default():
    assert Settings("tiny").command("apply") == "python -m lab.speed apply --preset tiny"
    asked = Settings("tiny", layers=2, lengths=(1, 2), dtype=torch.float32, min_rounds=1, device="cuda:1")
    assert asked.command("serve") == (
        "python -m lab.speed serve --preset tiny --layers 2 --lengths 1,2 --device cuda:1 --dtype float32 "
        "--min-rounds 1"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": ()},
        {"lengths": (256, 0)},
        {"chunks": (0,)},
        {"layers": 0},
        {"rounds": 2, "min_rounds": 3},
        {"threads": 0},
    ],
)
def test_settings_that_measure_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if "rounds" not in wrong else "rounds"):
        Settings("tiny", **wrong)


def test_a_cell_shows_three_figures_and_its_spread():
    assert shown(Spread(1234.5, 1000.0, 2000.0)) == "1,234 (1,000..2,000)"
    assert shown({"median": 0.01234, "low": 0.01, "high": 0.02}, spread=False) == "0.0123"
    assert shown(None) == "–" and shown(True) == "yes" and shown(12) == "12" and shown(3e-5) == "3.00e-05"


def test_columns_are_those_of_all_rows():
    assert Section("t", ({"a": 1}, {"b": 2, "a": 3})).columns == ("a", "b")


def test_a_goal_is_met_at_its_bound_and_not_past_it():
    assert goal("g", 2.0, most=2.0)["met"] and not goal("g", 2.01, most=2.0)["met"]
    assert goal("g", Spread(4.0, 1.0, 9.0), least=4.0)["met"] and not goal("g", 3.9, least=4.0)["met"]
    with pytest.raises(ValueError, match="no bound"):
        goal("g", 1.0)


def test_a_preset_line_says_what_was_cut():
    document = {"settings": Settings("tiny", layers=1).to_info()}
    assert preset_line(document) == "tiny, 1 layers, bfloat16"
    document = {"settings": Settings("tiny", device="cuda").to_info()}
    assert preset_line(document) == "tiny, all layers, bfloat16, cuda"


def test_every_benchmark_is_a_module_that_runs():
    import importlib

    for name in NAMES:
        assert callable(importlib.import_module(f"lab.speed.{name}").run)


def test_a_package_in_a_foreign_checkout_names_no_commit(monkeypatch, tmp_path):
    """A virtual environment lies in the user's own repository more often than not."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(
        ["git", "-C", str(tmp_path), *who, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True
    )
    packages = tmp_path / "venv" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(machine, "_TOP", packages)
    assert machine.commit() == "unknown"
    monkeypatch.setattr(machine, "_TOP", tmp_path)
    assert machine.commit() != "unknown"


def test_kernels_are_not_measured_on_a_cpu():
    with pytest.raises(ValueError, match="'cpu' launches no kernels: give --device cuda"):
        kernel.run(Settings("tiny"))
