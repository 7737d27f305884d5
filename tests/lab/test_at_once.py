"""The programs that measure answers at once: arms on small models, and every answer the one alone."""

from __future__ import annotations

import json

import pytest

from lab import batch, serve_load


@pytest.mark.slow
def test_answers_at_once_are_clocked_by_their_number(tmp_path, capsys):
    out = tmp_path / "batch.json"
    words = "--preset tiny --layers 2 --context 40 --tokens 4 --rounds 1 --sizes 1 3"
    assert batch.main([*words.split(), "--output", str(out)]) == 0
    document = json.loads(out.read_text())
    assert list(document["arms"]) == ["1", "3", "3 apart"]
    assert (document["serial"], document["answers other than alone"]) == ("", 0)
    assert all(speed > 0 for arm in document["arms"].values() for name in batch.CLOCKS for speed in arm[name])
    assert "| 3 apart |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_under_clients_is_clocked_and_its_answers_compared(tmp_path, capsys):
    out = tmp_path / "load.json"
    words = "--clients 1 2 --requests 4 --turns 2 --tokens 3 --rounds 1"
    assert serve_load.main([*words.split(), "--output", str(out)]) == 0
    document = json.loads(out.read_text())
    assert list(document["clients"]) == ["1", "2", "2, one at a time"]
    for told in document["clients"].values():
        assert (told["requests"], told["other answers"]) == (4, 0)
        assert 0 < told["first token, median"] <= told["answer, p99"]
    assert "| 2, one at a time |" in capsys.readouterr().out
