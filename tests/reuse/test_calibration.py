"""A calibration holds on cases it was not fitted to, is of what it was made of, and can be withdrawn."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore, KameraWindow
from kamera.errors import InvalidCertificate
from kamera.reuse import Arrangement, Calibration, Case, HeldOut, cases_of
from kamera.reuse.limits import upper_limit
from kamera.reuse.sweep import Trial, derive, replacing
from tests.models import samples, tiny
from tests.reuse.rig import HEAD, calibration, error, family, plain, prompt, reuser, words
from tests.reuse.test_approximate import LOOSE, NAME, filled, moved

# -- held out --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("happened", "of"), [(0, 1), (0, 59), (1, 93), (7, 104), (12, 98), (30, 60)])
def test_the_limit_is_that_of_clopper_and_pearson(happened, of):
    limit = upper_limit(happened, of)
    few = sum(math.comb(of, k) * limit**k * (1 - limit) ** (of - k) for k in range(happened + 1))
    assert few == pytest.approx(0.05, abs=1e-9)
    assert happened / of < limit < 1.0
    assert upper_limit(happened, of, 0.5) < limit


def test_a_limit_of_nothing_is_one():
    assert upper_limit(0, 0) == upper_limit(3, 3) == 1.0
    assert upper_limit(0, 59) < 0.05 < upper_limit(0, 58)
    for wrong in ((-1, 3, 0.95), (4, 3, 0.95), (1, 3, 1.0)):
        with pytest.raises(ValueError, match="is no sample"):
            upper_limit(*wrong)


# -- scope and withdrawal --------------------------------------------------------------------------


def test_a_calibration_of_text_admits_no_picture():
    backbone = tiny.backbone("qwen2_5_vl")
    made = calibration(backbone)
    picture = samples.chunk(backbone, samples.sample("qwen2_5_vl", 1), "")
    text = backbone.chunk_from_tensors(words(4, 6))
    assert made.outside(text, ["text"]) is None
    assert "and this is media behind text" in made.outside(picture, ["text"])
    assert "and this is text behind media" in made.outside(text, ["text", "media"])
    assert replace(made, scope=("media behind text",)).outside(picture, ["text"]) is None


def test_a_calibration_of_one_source_admits_no_other():
    backbone = family(NAME)
    made = calibration(backbone, sources=("tool",))
    own, other = (backbone.chunk_from_tensors(words(4, 6), label=role) for role in ("tool", "user"))
    assert made.outside(own, ["text"]) is None
    assert made.outside(other, ["text"]) == (
        "the calibration is of segments from 'tool', and this is from 'user'"
    )


def test_what_is_outside_its_scope_is_prefilled_by_name():
    backbone, store = family(NAME), filled()
    for changes, why in (
        ({"scope": ("media behind media",)}, "and this is text behind text"),
        ({"sources": ("tool",)}, "segments from 'tool', and this is from"),
    ):
        one = reuser(backbone, store, LOOSE, calibration=calibration(backbone, **changes))
        admissions = one.prepare(prompt(*moved())).admissions
        assert "approximate" not in [a.tier for a in admissions]
        assert any(why in a.reason for a in admissions)


def test_a_picture_of_a_slot_counts_as_its_left_context():
    backbone = tiny.backbone("qwen2_5_vl")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), HEAD, policy=LOOSE)
    window.append(samples.chunk(backbone, samples.sample("qwen2_5_vl", 1), ""))
    window.append(backbone.chunk_from_tensors(words(4, 6)))
    new = backbone.chunk_from_tensors(words(5, 6))
    assert Arrangement(window, [*window.slots, new])._modalities == ["media", "text", "text"]


def test_a_withdrawn_calibration_serves_nothing_from_then_on(tmp_path):
    backbone, store = family(NAME), filled()
    calibration(backbone).write(tmp_path)
    made = Calibration.read(tmp_path / calibration(backbone).file_name)
    one = reuser(backbone, store, LOOSE, calibration=made)
    asked = prompt(*moved())
    assert "approximate" in [a.tier for a in one.prepare(asked).admissions]
    made.withdraw("an audit found a segment\nbeyond its bound")
    admissions = one.prepare(asked).admissions
    assert "approximate" not in [a.tier for a in admissions]
    why = "the calibration was withdrawn: an audit found a segment beyond its bound"
    assert any(why in a.reason for a in admissions)
    assert made.refuses(1.0) == why
    with pytest.raises(InvalidCertificate, match="was withdrawn: an audit found a segment beyond its bound"):
        Calibration.read(made.path)


def test_one_withdrawn_between_plan_and_run_places_nothing():
    backbone, store = family(NAME), filled()
    made = calibration(backbone)
    plan = reuser(backbone, store, LOOSE, calibration=made).prepare(prompt(*moved()))
    assert "approximate" in [a.tier for a in plan.admissions]
    made.withdraw("an audit said so")
    done = plan.run()
    assert "approximate" not in [a.tier for a in done.admissions]
    assert error(done.window.next_token_logits(done.question), plain(backbone, prompt(*moved()))) < 1e-4
