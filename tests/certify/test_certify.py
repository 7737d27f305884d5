"""A probe says "safe" where patched reuse answers as re-prefill does, and never of what it cannot see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kamera import Backbone, ReusePolicy, testbed
from kamera.certify import certify, run_probe
from kamera.certify.pages import ENTRIES, draw_scene
from kamera.certify.probe import PER_SCENE, PROBE_SEED, PROBES, Query, digest_of, page_scenes
from kamera.certify.verdict import FLIPS, MARGIN, Outcome, judge, loss, wilson
from kamera.errors import ModalityNotSupported, ProcessorRequired
from kamera.ops import PatchBudget
from kamera.window.certificate import library_versions
from tests.models import processors, tiny


@pytest.fixture(scope="module")
def trained():
    return Backbone(*testbed.load())


@pytest.fixture(scope="module")
def untrained():
    return Backbone(processors.matching_model(), processors.picture_processor())


# -- on backbones ----------------------------------------------------------------------------------


def test_the_trained_backbone_is_safe_at_a_sufficient_rank(trained):
    *progress, made = run_probe(trained, probe="world", items=42, rank=32, model="testbed")
    assert progress == [(i, 42) for i in range(1, 43)]
    assert made.verdict == "safe", made.reason
    assert made.blind.high < made.reprefill.low, "the probe must show what blind reuse loses"
    assert made.patched.mean >= made.reprefill.mean - MARGIN
    assert made.flip_recover.low >= FLIPS
    assert (made.n, made.rank, made.probe, made.model) == (42, 32, "world", "testbed")
    assert (made.fingerprint, made.versions) == (trained.fingerprint, library_versions())
    assert made.matches(trained.fingerprint, PatchBudget(32, ReusePolicy.patch_bytes))


def test_the_trained_backbone_is_unsafe_at_rank_1(trained):
    made = certify(trained, probe="world", items=12, rank=1)
    assert made.verdict == "unsafe", made.reason
    assert made.patched.mean < made.reprefill.mean - MARGIN
    assert not made.matches(trained.fingerprint, PatchBudget(1, ReusePolicy.patch_bytes))


def test_too_few_questions_are_never_safe(trained):
    made = certify(trained, probe="world", items=6, rank=32)
    assert made.reprefill.mean == made.patched.mean == 1.0
    assert made.verdict == "cannot tell"
    assert "more questions are needed" in made.reason or "is needed to see a loss" in made.reason


def test_a_random_model_gets_cannot_tell(untrained):
    made = certify(untrained, probe="pages", items=7, rank=16)
    assert made.verdict == "cannot tell"
    assert "re-prefill answers" in made.reason
    assert made.chance == pytest.approx(1 / ENTRIES)
    assert not made.matches(untrained.fingerprint, PatchBudget(16, ReusePolicy.patch_bytes))


def test_what_cannot_be_asked_is_refused_by_name(untrained):
    with pytest.raises(ValueError, match="probe 'leaves' is none of pages, world"):
        certify(untrained, probe="leaves")
    with pytest.raises(ValueError, match="items 0"):
        certify(untrained, items=0)
    with pytest.raises((ModalityNotSupported, ProcessorRequired)):
        certify(tiny.backbone("qwen2_5_vl"), items=1)


# -- the questions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_is_the_same_every_time_and_all_of_it_counts(probe):
    first, second = (list(itertools.islice(PROBES[probe](), 2)) for _ in range(2))
    assert digest_of(probe, first) == digest_of(probe, second)
    assert digest_of(probe, first) != digest_of(probe, first[:1])
    assert digest_of(probe, first) != digest_of("another", first)
    second[0].contents[-1][0]["image"].putpixel((0, 0), (1, 2, 3))
    assert digest_of(probe, first) != digest_of(probe, second)
    for scene in first:
        assert 0 < len(scene.queries) <= PER_SCENE
        assert all(q.answer in q.options for q in scene.queries)


def test_every_page_question_has_an_answer_of_its_own():
    for scene in itertools.islice(page_scenes(), 6):
        assert len({q.answer for q in scene.queries}) == len({q.text for q in scene.queries}) == PER_SCENE
        assert len(scene.contents) == 3


def test_the_distractor_speaks_of_other_things(monkeypatch):
    written: list[list[str]] = []
    from kamera.certify import pages

    def spied(page, text, at, scale=2, write=pages._write):
        if scale == 3:  # a page's title begins it
            written.append([])
        written[-1] += text.lower().rstrip(".").split()
        write(page, text, at, scale)

    monkeypatch.setattr(pages, "_write", spied)
    for index in range(6):
        written.clear()
        draw_scene(np.random.default_rng([PROBE_SEED, index]), index)
        first, second, other, _ = written  # the pair is drawn before the distractor
        named = {w.lower() for w in (*pages.NAMES, *pages.TOWNS, *pages.FRUITS)}
        assert named & set(first) & set(second), "two hops need a word that both pages show"
        assert not named & set(other) & (set(first) | set(second))


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("red", "red"),
        ("The badge is Red.", "red"),
        ("It is blue, not red", "blue"),
        ("reddish", ""),
        ("", ""),
    ],
)
def test_an_answer_is_the_option_it_names_first(said, option):
    assert Query("?", "red", ("blue", "red")).read(said) == option


# -- the verdict -----------------------------------------------------------------------------------


def answers(n: int, *, blind: int = 0, patched: int = 0, ceiling: int = 0, kls=(1.0, 0.01)) -> list[Outcome]:
    """``n`` questions of which an arm gets the first so many wrong, and re-prefill the last so many."""
    out = []
    for i in range(n):
        prefilled = "wrong" if i >= n - ceiling else "right"
        out.append(
            Outcome(
                "right",
                prefilled,
                "off" if i < blind else prefilled,
                "off" if i < patched else prefilled,
                *kls,
            )
        )
    return out


RULES = {
    "all is well": (answers(100, blind=80), "safe", "restores 1.00"),
    "one answer lost of many": (answers(200, blind=160, patched=1), "safe", "restores 0.99"),
    "re-prefill is weak": (answers(100, blind=30, ceiling=60), "cannot tell", "re-prefill answers 0.40"),
    "re-prefill may be weak": (answers(12, blind=8, ceiling=4), "cannot tell", "re-prefill answers 0.67"),
    "the patch loses answers": (answers(100, blind=80, patched=10), "unsafe", "changes accuracy by -0.10"),
    "the patch does nothing": (answers(100, blind=80, patched=80), "unsafe", "changes accuracy"),
    "too few to rule out a loss": (answers(20, blind=15), "cannot tell", "more questions"),
    "too few flips to know": (answers(100, blind=12), "cannot tell", "more questions"),
    "half of the flips stay": (answers(400, blind=40, patched=12), "unsafe", "the patch restores 0.70"),
    "no gap, and the patch is seen to work": (answers(100), "safe", "closes 0.99"),
    "no gap, and nothing to close": (answers(100, kls=(0.0, 0.0)), "cannot tell", "nothing to close"),
    "no gap, a patch of zeros": (answers(100, kls=(0.1, 0.1)), "cannot tell", "do not reach"),
}


@pytest.mark.parametrize("case", RULES)
def test_the_rules_of_the_verdict(case):
    outcomes, verdict, reason = RULES[case]
    judged = judge(outcomes, chance=0.1)
    assert (judged.verdict, reason in judged.reason) == (verdict, True), judged.reason


def test_a_model_that_guesses_well_is_still_weak():
    outcomes = answers(200, blind=100, ceiling=60)  # 0.70 right
    assert judge(outcomes, chance=0.1).verdict != "cannot tell"
    assert judge(outcomes, chance=0.5).verdict == "cannot tell"


def test_nothing_asked_is_a_callers_mistake():
    with pytest.raises(ValueError, match="no question"):
        judge([], chance=0.1)


def test_intervals_are_the_published_ones():
    share = wilson([True] * 8 + [False] * 2)
    assert (share.low, share.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    all_right = wilson([True] * 10)
    assert (all_right.mean, all_right.high) == (1.0, 1.0)
    assert all_right.low == pytest.approx(0.7225, abs=1e-4)
    # Agresti and Min: 10 lost, none won, of 100
    changed = loss(answers(100, patched=10), "patched")
    assert (changed.mean, changed.low, changed.high) == pytest.approx((-10 / 102, -0.1589, -0.0372), abs=2e-4)
