"""``kamera try`` on the shipped backbone: its costs are those of hooks, and its answers a person's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kamera import testbed
from tests.cli.run import kamera


@pytest.fixture
def pictures(tmp_path):
    files = []
    for i, frame in enumerate(testbed.World(seed=3).episode(0, legends=4).frames[:5]):
        files.append(tmp_path / f"{i}.png")
        frame.image.save(files[-1])
    return files


def test_own_pictures_are_walked_and_compared_with_a_re_prefill(capsys, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ("--ask", "value of tag 3?", "--max-new-tokens", "4", "--quiet", "--format", "json")
    done = kamera(capsys, "try", "testbed", *pictures, *options)
    assert (done.code, done.err) == (0, "")
    rows = {(row["operation"], row["arm"]): row for row in done.document["rows"]}
    assert {name for name, _ in rows} == {"new picture", "look back", "another order"}
    for (name, arm), row in rows.items():
        cache = rows[name, "prefix cache"]
        assert cache["right"] == cache["n"] and cache["kl"] == 0.0 < cache["tokens"]
        if arm == "kamera":
            assert row["tokens"] < cache["tokens"] and row["kl"] < rows[name, "blind reuse"]["kl"]
    assert len(done.document["answers"]) == 4
    assert "<html" in Path(done.document["view"]).read_text()[:300].lower()


def test_too_few_and_unreadable_files_are_refused(capsys, pictures, tmp_path):
    assert (
        "4 contents for a window of 3: give at least 5" in kamera(capsys, "try", "testbed", *pictures[:4]).err
    )
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    assert "x.bin' is neither" in kamera(capsys, "try", "testbed", *pictures, tmp_path / "x.bin").err
