"""``python -m lab.reuse roc | sink | shift``: a table, JSON, and a plot."""

from __future__ import annotations

import json

import pytest

from lab.agent_traces import trace
from lab.reuse.__main__ import main
from tests.cli.run import run

PNG = b"\x89PNG"


@pytest.mark.slow
def test_roc_lists_every_channel_of_every_layer(capsys, tmp_path):
    plot = tmp_path / "roc.png"
    done = run(capsys, main, "roc", "testbed", "--blocks", 2, "--format", "json", "--plot", plot)
    rows = done.document["roc"]
    assert done.code == 0 and {row["channel"] for row in rows} == {"k", "v"}
    assert len(rows) == 2 * (1 + max(row["layer"] for row in rows))
    assert all(0.0 <= row["as_stored"] <= 1.0 for row in rows)
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_sink_shows_the_drift_by_first_tokens(capsys, tmp_path):
    done = run(capsys, main, "sink", "testbed", "--segments", 1, "--plot", tmp_path / "s.png")
    assert done.code == 0 and "KL (nats)" in done.out
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    refused = run(capsys, main, "sink", "testbed", "--text", short)
    assert refused.code == 2 and "give a longer text" in refused.err


@pytest.mark.slow
def test_shift_predicts_per_service(capsys, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(seed=1, requests=4, only=("metadata", "sysvar"))))
    done = run(capsys, main, "shift", path, "--format", "json", "--plot", tmp_path / "s.png")
    rows = {row["service"]: row for row in done.document["shift"]}
    assert rows["metadata"]["first_variation"] < 0.1 < 0.5 < rows["sysvar"]["first_variation"]
    assert rows["metadata"]["predicted"] > rows["sysvar"]["predicted"]
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)
    recovered = run(capsys, main, "recovery", path, "-q", "--plot", tmp_path / "r.png")
    assert recovered.code == 0 and (tmp_path / "r.png").read_bytes().startswith(PNG)
    assert run(capsys, main, "shift", path, "--rule", "none").code == 2


def test_a_plot_without_matplotlib_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run(capsys, main, "roc", "testbed", "--plot", tmp_path / "x.png")
    assert done.code == 2 and "kamera[plots]" in done.err


@pytest.mark.parametrize("verb", ["roc", "sink"])
def test_a_missing_model_is_refused(capsys, verb):
    done = run(capsys, main, verb, "/nowhere")
    assert done.code == 1 and "/nowhere" in done.err
