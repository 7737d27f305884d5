"""A sweep fits thresholds to one half of its cases, tests them on the other, and says why it gives none."""

from __future__ import annotations

import pytest
import torch

from kamera.reuse import Calibration, HeldOut, Point
from lab.reuse.sweep import (
    Case,
    Trial,
    acceptance,
    calibrate,
    cases_of,
    derive,
    operating_point,
    replacing,
    windows_of,
)
from tests.reuse.rig import family, words

NAME = "llama_mqa"


def of_case(kl: float = 0.01, matched: int = 64, agrees: bool = True, replaced: bool = False) -> list[Trial]:
    """A case's trial, and one of too little left context."""
    return [Trial(16, (0.0, 3.0), 0.9, False), Trial(matched, (0.0, kl), 0.9, agrees, replaced)]


def derived(fitted: list[list[Trial]], rest: list[list[Trial]], bound: float = 0.05) -> Calibration:
    backbone = family(NAME)
    chunk = backbone.chunk_from_tensors(words(1, 6), label="tool")
    case = Case((backbone.chunk_from_tensors(words(2, 6)),), chunk, (words(3, 2),), ())
    return derive(backbone, [case] * (len(fitted) + len(rest)), [*fitted, *rest], bound=bound)


def test_a_threshold_has_to_hold_on_the_half_that_is_held_out():
    """Seven of 104 fresh segments drifted beyond the bound of a calibration that had none."""
    sound = derived([of_case()] * 60, [of_case()] * 60)
    assert sound.threshold == 0.9 and sound.refusal == ""
    assert sound.tested == HeldOut(60, 60, 0, 0)
    assert sound.tested.violation_limit < 0.05
    loose = derived([of_case()] * 60, [*[of_case()] * 56, *[of_case(kl=0.06)] * 4])
    assert loose.threshold is None
    assert loose.tested.violations == 4
    assert "4 of the 60 held-out cases it accepted drift beyond 0.05 nats" in loose.refusal
    assert loose.guard(64) is not None and loose.refusal in loose.guard(64)


def test_other_answers_count_however_small_the_drift():
    made = derived([of_case()] * 60, [*[of_case()] * 57, *[of_case(agrees=False)] * 3])
    assert made.threshold is None and (made.tested.violations, made.tested.flips) == (0, 3)
    assert "have another next token" in made.refusal


def test_too_few_held_out_cases_bound_nothing():
    made = derived([of_case()] * 40, [of_case()] * 40)
    assert made.threshold is None and made.tested.violations == 0
    assert made.tested.violation_limit == pytest.approx(1 - 0.05 ** (1 / 40))


def test_one_replaced_piece_that_is_accepted_and_drifts_is_enough():
    wrong = [*of_case(), Trial(64, (0.0, 0.06), 0.9, True, replaced=True)]
    made = derived([of_case()] * 199, [*[of_case()] * 198, wrong])
    assert made.tested.violation_limit < 0.05
    assert made.threshold is None and made.replaced == HeldOut(199, 1, 1, 0)
    assert "a replaced piece" in made.refusal


def test_each_piece_of_a_context_is_replaced_in_turn():
    backbone = family(NAME)

    def case(first: int) -> Case:
        before = tuple(backbone.chunk_from_tensors(words(first + i, 5 + i)) for i in range(3))
        return Case(before, backbone.chunk_from_tensors(words(9, 4)), (words(8, 2),), ())

    one, other = case(20), case(40)
    made = replacing(one, other)
    assert [matched for matched, _ in made] == [6 + 7, 7, 0]
    for at, (_, behind) in enumerate(made):
        assert [c.id for c in behind] == [(other if i == at else one).before[i].id for i in range(3)]
    assert replacing(one, one) == ()


def test_the_halves_share_no_document():
    backbone = family(NAME)
    documents = [torch.full((80,), 20 + seed).tolist() for seed in range(6)]
    options = {"count": 8, "context": 40, "segment": 12, "question": 4, "ladder": (0,)}
    cases = cases_of(backbone, documents, sources=("tool", "user"), **options)
    told = [{int(i) for c in (*case.before, case.chunk) for i in c.input_ids} for case in cases]
    assert set.union(*told[:4]) <= {20, 21, 22} and set.union(*told[4:]) <= {23, 24, 25}
    assert [case.chunk.label for case in cases[:3]] == ["tool", "user", "tool"]


def test_a_sweep_binds_its_thresholds_to_the_backbone():
    backbone = family(NAME)
    documents = [words(seed, 120).tolist() for seed in range(4)]
    options = {"count": 6, "context": 40, "segment": 12, "question": 4, "ladder": (0, 16)}
    cases = cases_of(backbone, documents, **options)
    made = calibrate(backbone, cases, bound=100.0)
    assert made.difference(backbone) is None
    assert made.windows == (0, 0, 0) and made.trials == 3 * (2 + 4)  # four pieces, each replaced in turn
    assert made.threshold is None and "too few trials drifted" in made.refusal
    assert (made.scope, made.sources) == (("text behind text",), ("",))
    assert calibrate(backbone, cases[:2], bound=1e-12).windows == (0, None, None)
    with pytest.raises(ValueError, match="at least four"):
        cases_of(backbone, documents[:3], **options)
    with pytest.raises(ValueError, match="no case"):
        calibrate(backbone, [])


def test_the_operating_point_is_the_least_that_the_guard_passes():
    def trials(matched: int, count: int, kl: float, cosine: float) -> list[Trial]:
        return [Trial(matched, (0.0, kl), cosine + i / 1_000, kl < 0.05) for i in range(count)]

    safe, wrong = trials(64, 20, 0.01, 0.8), trials(16, 5, 3.0, 0.97)
    both = [*safe, *wrong]
    windows = windows_of(both, 0.05)
    assert windows == (16, 64)
    assert operating_point(both, windows, 0.05) == 0.8
    assert operating_point(both[1:], windows, 0.05) is None  # nineteen pass
    assert operating_point(both[:-1], windows, 0.05) is None  # four drift: the sweep shows too little
    assert operating_point(both, (16, None), 0.05) is None
    assert windows_of([*both, *trials(128, 1, 0.06, 0.9)], 0.05) == (16, None)
    curve = acceptance(both)
    assert [p.accepted for p in (curve[0], curve[-1])] == [1.0, 1 / 25]
    assert curve[-1].worst == 3.0  # the probe alone would take a wrong one first
    assert isinstance(curve[0], Point)
