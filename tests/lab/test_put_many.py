"""The benchmark of batches counts what a batch does, and times each arm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kamera.store import ChunkStore
from lab.put_many import EACH, ONE_BY_ONE, TOGETHER, busy, counts, main


def test_a_batch_is_counted_beside_puts_one_by_one(tmp_path: Path) -> None:
    found = {arm: counts(tmp_path / arm, 5, arm) for arm in (ONE_BY_ONE, EACH, TOGETHER)}
    assert found[TOGETHER]["syncs"] == 2 < found[EACH]["syncs"] <= found[ONE_BY_ONE]["syncs"]
    assert found[TOGETHER]["locks"] == 2 and found[ONE_BY_ONE]["locks"] == 10
    assert found[TOGETHER]["statements"] == 3 and found[ONE_BY_ONE]["statements"] == 15


def test_every_arm_is_timed_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--counts", "1,2", "--kib", "1", "--rounds", "1", "--output", str(tmp_path / "rows.json")])
    document = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["objects"], row["arm"]) for row in document["rows"]] == [
        (number, arm) for number in (1, 2) for arm in (ONE_BY_ONE, EACH, TOGETHER)
    ]
    assert all(0 < row["ms"] <= row["largest ms"] for row in document["rows"])
    assert document["command"] == "python -m lab.put_many --counts 1,2 --kib 1 --rounds 1"
    assert "| objects | arm |" in capsys.readouterr().out


def test_the_other_process_writes_and_ends(tmp_path: Path) -> None:
    with busy(tmp_path), ChunkStore.open(tmp_path / "store") as store:
        assert (tmp_path / "noise").stat().st_size > 0 and store.ls() == []
