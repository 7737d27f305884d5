"""The composed-patch table: what its arms have to show, and which have to fail."""

from __future__ import annotations

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import prefill_anchor
from lab.composed.__main__ import summary, table
from lab.composed.windows import Pool, TermsOf, measure, windows
from lab.paper.draw import HELD_OUT
from lab.testbed import load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def row():
    backbone = HfEngine(*load("gqa"))
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    terms = TermsOf(Pool(backbone, anchor, HELD_OUT, 0), 16)
    window = windows(terms.stage, 3)[1]
    assert (window.task, window.order, window.old) == ("oldest left", (1, 2), (0, 1, 2))
    return measure(terms, window, None)


def test_two_that_stay_are_served_their_own_pair(row):
    arms = row.arms
    for name in ("linear", "fold", "composed"):
        assert arms[name].kl == pytest.approx(arms["own patch"].kl, abs=1e-3)
    assert arms["own patch"].kl < 0.05 * arms["blind"].kl


def test_sabotaged_terms_fail(row):
    for name in ("SABOTAGE swapped", "SABOTAGE random"):
        assert row.arms[name].kl > row.arms["composed"].kl + 0.1 * row.arms["blind"].kl


def test_the_table_names_every_arm(row):
    shown = table(summary([row], 3))
    assert all(name in shown for name in row.arms) and "rank correlation" in shown
