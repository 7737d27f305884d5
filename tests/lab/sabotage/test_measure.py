"""What a setup sees, what a bed is blind to, and that setups ask what they say they ask."""

import dataclasses

import numpy as np
import pytest

from kamera.certify.metrics import bootstrap
from kamera.engines.hf import HfEngine
from lab.sabotage.__main__ import main
from lab.sabotage.document import blindness, document, tables
from lab.sabotage.measure import Asked, Bed, measure, row
from lab.sabotage.setups import HELD_OUT, SETUPS, questions
from lab.testbed import load
from lab.testbed.regimes import RepeatingWorld

BY_NAME = {setup.name: setup for setup in SETUPS}
N = 60


def answered(agree, kl):
    return {"right": agree, "agree": agree, "kl": kl}


SOUND = answered(np.ones(N), np.zeros(N))
BLIND = answered(np.zeros(N), np.full(N, 4.0))


def test_what_an_arm_loses_for_certain_is_seen():
    half = np.arange(N) % 2.0
    assert row("a", answered(half, np.zeros(N)), SOUND, BLIND).seen == "decisions"
    assert row("a", answered(np.ones(N), np.full(N, 0.2)), SOUND, BLIND).seen == "likelihood"
    assert row("a", SOUND, SOUND, BLIND).seen == ""
    once = np.ones(N)
    once[0] = 0.0
    assert row("a", answered(once, np.zeros(N)), SOUND, BLIND).seen == "", "one in sixty may be chance"
    found = row("a", answered(half, np.full(N, 1.0)), SOUND, BLIND)
    assert found.accuracy.mean == found.lost.mean == 0.5 and found.eta.mean == 0.75


def bed(seen, reprefill=1.0):
    """A bed with one setup in which `not rotated` is seen so."""
    rows = [row(arm, SOUND, SOUND, BLIND) for arm in ("sound", "not rotated", "rotated twice")]
    rows[1] = dataclasses.replace(rows[1], seen=seen)
    asked = Asked(SETUPS[0], N, 5, bootstrap([reprefill] * N), tuple(rows))
    return Bed("override", "gqa", 1, (asked,))


def test_a_bed_is_blind_to_what_changes_no_decision_it_can_answer():
    assert "not rotated" not in bed("decisions").blind_to
    assert "rotated twice" in bed("decisions").blind_to
    assert "not rotated" in bed("likelihood").blind_to
    assert "not rotated" in bed("decisions", reprefill=0.1).blind_to
    found = document([bed("likelihood")], command="c", items=N, rank=1, dtype="float32", seed=0, seconds=1.0)
    assert "blind to: not rotated (likelihood alone sees it), rotated twice" in blindness(found["beds"][0])


@pytest.mark.parametrize("setup", SETUPS, ids=[setup.name for setup in SETUPS])
def test_every_question_is_about_what_the_setup_says(setup):
    episode = RepeatingWorld(HELD_OUT).episode(0, layout=setup.layout)
    asked = questions(episode, setup, 8)
    assert len(asked) == 8 or (setup.name == "left" and asked)
    for question in asked:
        assert episode.answer(question, setup.order) == question.answer
        turned = episode.answer(question, (setup.target, *setup.window))
        if setup.name in ("last says", "earlier") or (setup.name, question.kind) == ("shown again", "glyph"):
            assert turned != question.answer, "the order decides"
        if setup.before:
            was = episode.ask(question.kind, question.subject, (*setup.before, setup.target))
            gone = set(setup.before) - set(setup.window)
            assert bool(gone & set(was.frames)) is (setup.name == "left")
        if setup.name == "bound":
            assert question.hops == 2 and question.frames[-1] == setup.target
    still = RepeatingWorld(HELD_OUT, "static").episode(0, layout=setup.layout)
    if setup.name in ("last says", "shown again"):
        assert questions(still, setup, 8) == [], "frames that agree leave nothing to decide"


def test_a_shipped_backbone_sees_a_missing_patch_not_a_turn():
    backbone = HfEngine(*load("gqa"))
    *said, found = measure("gqa", backbone, "override", items=8, rank=32, setups=[BY_NAME["bound"]])
    assert said == ["gqa, override: bound"]
    (asked,) = found.asked
    rows = {one.arm: one for one in asked.rows}
    assert asked.n == rows["sound"].n == 8 and asked.windows == 1
    assert rows["sound"].eta.mean > 0.99 and rows["sound"].accuracy.mean >= 0.8
    assert rows["blind"].eta.mean == 0.0
    assert "values left blind" not in found.blind_to and "not rotated" in found.blind_to
    shown = document([found], command="c", items=8, rank=32, dtype="float32", seed=0, seconds=1.0)
    assert any("this bed is blind to: not rotated" in str(part) for part in tables(shown))


def test_names_that_are_not_there_are_refused_in_one_line(capsys):
    for wrong in (["--world", "still"], ["--backbone", "gpt"]):
        assert main(wrong) == 2
        told = capsys.readouterr().err
        assert repr(wrong[1]) in told and "there are" in told
