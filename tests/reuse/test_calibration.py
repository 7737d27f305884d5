"""A calibration holds on cases it was not fitted to, is of what it was made of, and can be withdrawn."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow
from kamera.errors import InvalidCertificate
from kamera.reuse import Arrangement, Calibration
from kamera.reuse.limits import upper_limit
from tests.models import samples, tiny
from tests.reuse.rig import HEAD, calibration, error, family, plain, prompt, reuser, words
from tests.reuse.test_approximate import LOOSE, NAME, filled, moved

# -- limits ----------------------------------------------------------------------------------------


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
