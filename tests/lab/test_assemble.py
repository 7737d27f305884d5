"""The count of assembled windows: what it prints is what hooks saw, and placing helps."""

from __future__ import annotations

import torch

from lab.assemble import main, rows_of
from lab.speed.presets import TINY


def test_chunks_of_an_earlier_window_run_nothing_where_they_are_placed(tmp_path, capsys):
    (row,) = rows_of(TINY.build(dtype=torch.float32), 8, 4, 3)[:1]
    assert (row["library"], row["window"], row["arrives"]) == (8, 4, "again")
    assert (row["chunks placed"], row["forwards placed"]) == (0.0, 0.0)
    assert row["chunks given"] > 0.0


def test_it_writes_what_it_prints(tmp_path, capsys):
    main(["--sizes", "4", "--draws", "1", "--output", str(tmp_path / "assemble.json")])
    assert '"library": 4' in (tmp_path / "assemble.json").read_text()
    assert "| 4 |" in capsys.readouterr().out
