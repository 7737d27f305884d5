"""Screens on the screen reader: the demo's third part, shortened."""

from __future__ import annotations

from kamera.eval.demo import BLIND, CACHE, KAMERA, Demo
from kamera.eval.screens import screens, walk_screens
from tests.models.screen_reader import screen_reader
from tests.models.smollm2 import needs_smollm2

pytestmark = needs_smollm2


def test_screens_that_leave_and_come_back_are_answered_rightly():
    *steps, result = walk_screens(screen_reader(), keep=2, count=4, asked=1)
    assert isinstance(result, Demo) and steps == ["new screen"] * 2 + ["look back", "another order"]
    rows = {(row.operation, row.arm): row for row in result.rows}
    for name in dict.fromkeys(steps):
        own, cache, blind = (rows[name, arm] for arm in (KAMERA, CACHE, BLIND))
        assert own.right == cache.right == own.n > 0, [a for a in result.answers if a[0] == name]
        assert own.tokens <= cache.tokens and own.kl <= blind.kl + 1e-3
    assert rows["new screen", KAMERA].tokens < 0.6 * rows["new screen", CACHE].tokens
    assert len({said for *_, said in result.answers}) > 2


def test_no_label_stands_on_two_screens():
    labels = [thing.label for things in screens(12) for thing in things]
    assert len(labels) == len(set(labels)) == 48
