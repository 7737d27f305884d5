"""Trajectories edit as often in a turn as they say, and run on every trained backbone."""

from __future__ import annotations

import itertools
import random

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.leyline.prompts import HELD_OUT, Desk, conversation
from lab.leyline.suites import _old, random_edits, trajectory
from lab.testbed import BACKBONES, load


def test_a_turn_has_at_most_its_edits_and_sometimes_as_many():
    desk, draw = Desk(HfEngine(*testbed.load())), random.Random(0)
    world, found = testbed.World(HELD_OUT), []
    frames = [f for i in range(3) for f in world.episode(i, layout="LLIP").frames][:11]
    full = desk.conversations.render(conversation(frames))
    for _ in range(60):
        directives = _old(draw, full, 8)
        assert all(a.end <= b.start for a, b in itertools.pairwise(directives))
        found.append(len(directives))
    assert set(found) == set(range(1, 9))
    assert _old(draw, desk.conversations.render(conversation(frames[:10])), 8) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", BACKBONES)
def test_suites_run_on_every_trained_backbone(family):
    backbone = HfEngine(*load(family))
    arms = random_edits(backbone, family, 2, 0)["arms"]
    assert sum(told["n"] for told in arms.values()) == 6
    found = trajectory(backbone, family, 5, 2, 0)
    assert found["turns with edits"] >= 1 and found["most edits of a turn"] <= 2
    for suite in (arms, found["arms"]):
        for name, told in suite.items():
            if told["n"] and not name.startswith("amortize"):
                assert told["answers as re-prefill"] == 1.0
