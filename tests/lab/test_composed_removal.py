"""What takes out a chunk that has left: the arms of the table, and what it says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.composed.removal import LEFT, STAYS, Arm, Left, lines, run, summary
from lab.paper.trial import Judged


def judged(kl: list[float]) -> Judged:
    asked = np.ones(len(kl))
    return Judged(asked, asked, np.array(kl), 2 * asked, 0.0, 0.0, 0.0, 0.0, 0.0)


def left(episode: int) -> Left:
    arms = {
        "blind": Arm(judged([4.0, 4.0, 2.0]), 0, 0, 0),
        "keep": Arm(judged([1.0, 3.0, 8.0]), 0, 0, 0),
        "removal patch@4": Arm(judged([0.0, 1.0, 2.0]), 10, 1, 0),
    }
    return Left("oldest left", episode, np.array([True, True, False]), 100, arms)


def test_what_stays_is_held_against_blind_what_left_against_keep(tmp_path):
    found = summary([left(0), left(1)])
    arm = found["arms"]["removal patch@4"]
    assert found["windows"] == 2 and arm["share"] == 0.1 and arm["forwards ahead"] == 1
    assert arm[STAYS]["n"] == 4 and arm[STAYS]["eta"] == [1 - 1 / 8] * 3
    assert arm[LEFT]["n"] == 2 and arm[LEFT]["won back"] == [1 - 2 / 8] * 3
    (tmp_path / "gqa.json").write_text(json.dumps({**found, "family": "gqa", "count": 4}))
    shown = "\n".join(lines(tmp_path))
    assert "| removal patch@4 | 0.875 [0.88, 0.88] | 1.000 | 0.750 [0.75, 0.75] |" in shown
    assert "n 4 of what stays, 2 of what left" in shown


@pytest.mark.slow
def test_removal_and_refresh_take_out_what_left_and_sabotage_does_not():
    found = summary(run(HfEngine(*testbed.load()), 3, 2))["arms"]
    assert found["one forward"][LEFT]["agreement"] == 1.0
    assert found["keep"][LEFT]["agreement"] < 0.3
    for name in ("removal patch@16", "refresh@16", "composed, known"):
        assert found[name][LEFT]["won back"][0] > 0.9 and found[name][STAYS]["eta"][0] > 0.9
    assert found["SABOTAGE other removal"][LEFT]["won back"][0] < 0.5
    assert found["SABOTAGE swapped"][STAYS]["eta"][0] < found["composed, known"][STAYS]["eta"][0] - 0.2
