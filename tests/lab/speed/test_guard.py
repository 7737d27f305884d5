"""The guard sees a fall, and only a fall."""

from __future__ import annotations

import dataclasses

import pytest

from lab import guard
from lab.guard import Ratio, Run
from lab.speed.settings import Settings
from lab.speed.timing import Spread

HELD = {"apply: times faster": Ratio(100.0, "more", 0.4), "window: times a copy": Ratio(2.0, "less", 0.5)}
SMALL = Run(
    "apply",
    Settings("tiny", lengths=(32,), rounds=1, min_rounds=1, seconds=0),
    {"times faster": ("more", 0.5), "share of copy": ("more", 0.2)},
)


def found(faster, copies):
    values = dict(zip(HELD, (faster, copies), strict=True))
    return {name: dataclasses.replace(ratio, value=values[name]) for name, ratio in HELD.items()}


@pytest.mark.parametrize(("faster", "copies"), [(100, 2), (61, 2), (1e6, 0.001), (100, 3.9)])
def test_within_tolerance_or_better_nothing_fell(faster, copies):
    assert list(guard.compare(HELD, found(faster, copies))) == []


@pytest.mark.parametrize(
    ("faster", "copies", "named"),
    [(59, 2, "apply"), (100, 4.1, "window"), (float("nan"), 2, "apply"), (100, float("nan"), "window")],
)
def test_a_ratio_that_lost_more_than_its_tolerance_fell(faster, copies, named):
    (line,) = guard.compare(HELD, found(faster, copies))
    assert line.startswith(f"fell: {named}: ") and "better" in line


def test_a_ratio_that_nothing_measures_any_more_is_told():
    measured = found(100, 2)
    del measured["window: times a copy"]
    (line,) = guard.compare(HELD, measured)
    assert line.startswith("gone: window: times a copy")


def test_a_new_ratio_is_no_fall():
    measured = found(100, 2) | {"serve: times as long": Ratio(1.0, "more", 0.5)}
    assert list(guard.compare(HELD, measured)) == []


def test_an_update_keeps_tolerances_that_were_set(tmp_path):
    path = tmp_path / "guard.json"
    held = {"a: x": Ratio(1.0, "more", 0.1)}
    guard.write(path, {}, {"a: x": Ratio(3.0, "more", 0.5), "b: y": Ratio(4.0, "less", 0.5)}, held)
    assert guard.read(path) == {"a: x": Ratio(3.0, "more", 0.1), "b: y": Ratio(4.0, "less", 0.5)}
    assert guard.read(tmp_path / "none.json") == {}


def test_the_guard_runs_end_to_end_and_its_exit_code_tells(tmp_path, monkeypatch, capsys):
    reference = tmp_path / "guard.json"
    monkeypatch.setattr(guard, "REFERENCE", reference)
    monkeypatch.setattr(guard, "RUNS", (SMALL,))
    assert guard.main(["--update"]) == 0
    held = guard.read(reference)
    assert "apply tiny 32 patched: times faster" in held and len(held) == 8
    loose = {name: dataclasses.replace(ratio, tolerance=1 - 1e-6) for name, ratio in held.items()}
    guard.write(reference, {}, loose, loose)
    capsys.readouterr()
    assert guard.main([]) == 0
    assert "8 of 8 ratios hold" in capsys.readouterr().out
    # a busy machine may take a thousand times as long; somebody made apply slower by more than that
    lost = {name: dataclasses.replace(ratio, value=ratio.value * 1e12) for name, ratio in loose.items()}
    guard.write(reference, {}, lost, loose)
    assert guard.main(["--only", "apply"]) == 1
    out = capsys.readouterr().out
    assert out.count("fell: ") == 8 and "0 of 8 ratios hold" in out


def test_rows_are_told_apart_by_what_they_are_of_not_by_figures():
    result = guard.measured(SMALL)
    names = [name for name, _ in guard.ratios(result, SMALL)]
    assert len(set(names)) == len(names) == 8
    assert not any("torch" in name for name in names)
    cell = result.sections[0].rows[1]["times faster"]
    assert isinstance(cell, Spread)


def test_every_committed_ratio_is_of_a_run_the_guard_makes():
    held = guard.read(guard.REFERENCE)
    starts = tuple(f"{run.name} {run.settings.preset} " for run in guard.RUNS)
    assert held and all(name.startswith(starts) for name in held)
    assert all(0 < ratio.tolerance < 1 and ratio.value > 0 for ratio in held.values())
