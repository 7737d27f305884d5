"""Approximate segments are served only under a calibration of this backbone, guarded and probed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore
from kamera.content import Encoded
from kamera.engines import Span
from kamera.errors import CertificateMismatch, InvalidCertificate
from kamera.patches import equal_left, later_of
from kamera.reuse import Calibration
from kamera.reuse.probe import likeness
from tests.reuse.rig import FULL, calibration, error, family, parts, plain, prompt, reuser, words

LOOSE = replace(FULL, minimum="blind")
NAME = "llama_mqa"


def filled() -> ChunkStore:
    """Holds a, b and c, each behind the ones before it."""
    store = ChunkStore.open("memory://")
    a, b, c, _, question = parts()
    reuser(family(NAME), store).prepare(prompt(a, b, c, question)).run()
    return store


@pytest.fixture
def store() -> ChunkStore:
    return filled()


def moved() -> tuple[torch.Tensor, ...]:
    """b and c behind another chunk than a."""
    _, b, c, d, question = parts()
    return d, b, c, question


def test_nothing_approximate_is_served_uncalibrated(store):
    backbone, asked = family(NAME), prompt(*moved())
    plan = reuser(backbone, store, LOOSE).prepare(asked)
    assert [a.tier for a in plan.admissions] == ["none"] * 3
    done = plan.run()
    assert {s.guarantee for s in done.window.slots} == {"exact"}
    assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4


def test_an_admitted_segment_shows_its_guarantee_and_cost(store):
    backbone = family(NAME)
    one = reuser(backbone, store, LOOSE, calibration=calibration(backbone))
    plan = one.prepare(prompt(*moved()))
    assert [a.tier for a in plan.admissions] == ["none", "approximate", "approximate"]
    done = plan.run()
    assert [a.tier for a in done.admissions] == ["none", "approximate", "approximate"]
    assert {a.guarantee for a in done.admissions[1:]} == {"near"}
    assert [s.guarantee for s in done.window.slots] == [a.guarantee for a in done.admissions]
    said = (plan.cost.forwards, plan.cost.tokens)
    assert said == (done.report.forwards, done.report.tokens_recomputed)
    assert plan.cost.tokens == len(moved()[0]) + 2 * 2  # two probed tokens of each segment


@pytest.mark.parametrize("forms", ["always", "returning"])
def test_new_chunks_behind_an_approximate_one_share_their_forward(store, forms):
    backbone = family(NAME)
    policy = replace(LOOSE, forms=forms)
    plan = reuser(backbone, store, policy, calibration=calibration(backbone)).prepare(
        prompt(parts()[3], parts()[1], words(60, 70), words(61, 80), words(62, 90), parts()[4])
    )
    assert [a.tier for a in plan.admissions][:5] == ["none", "approximate", "none", "none", "none"]
    done = plan.run()
    said = (plan.cost.forwards, plan.cost.tokens)
    assert said == (done.report.forwards, done.report.tokens_recomputed)


def test_a_refused_probe_is_prefilled(store):
    backbone, asked = family(NAME), prompt(*moved())
    strict = calibration(backbone, threshold=1.0 + 1e-9)
    done = reuser(backbone, store, LOOSE, calibration=strict).prepare(asked).run()
    assert [a.tier for a in done.admissions] == ["none"] * 3
    assert "the probe found a cosine" in done.admissions[1].reason
    assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4


def test_one_refusal_leaves_the_others_their_own_probe():
    backbone, asked = family(NAME), prompt(*moved())

    def run(threshold: float):
        given = calibration(backbone, threshold=threshold)
        return reuser(backbone, filled(), LOOSE, calibration=given).prepare(asked).run()

    cosines = [float(a.reason.split()[6].rstrip(",")) for a in run(2.0).admissions[1:]]
    assert cosines[0] < cosines[1]  # behind a prefilled b, c is as it was stored behind it, but for d
    done = run(sum(cosines) / 2)
    assert [a.tier for a in done.admissions] == ["none", "none", "approximate"]
    assert [s.guarantee for s in done.window.slots] == ["exact", "exact", "near"]


def test_the_guard_compares_the_left_context(store):
    backbone = family(NAME)
    _, b, _, d, _ = parts()
    asked = prompt(*moved())
    for least, tiers in ((len(b), ["none", "none", "approximate"]), (len(b) + 1, ["none"] * 3)):
        guarded = calibration(backbone, windows=(0, 0, least))
        plan = reuser(backbone, store, LOOSE, calibration=guarded).prepare(asked)
        assert [a.tier for a in plan.admissions] == tiers
    assert "17 equal tokens of left context reach 2 of 3 layers: 18 are needed" in plan.admissions[2].reason
    none = calibration(backbone, windows=(0, 0, None))
    assert "no tested left context" in none.guard(1_000)
    assert len(d) == 14


@pytest.mark.parametrize("minimum", ["patched", "orbit"])
def test_the_policys_minimum_rules(store, minimum):
    backbone = family(NAME)
    policy = replace(FULL, minimum=minimum)
    plan = reuser(backbone, store, policy, calibration=calibration(backbone)).prepare(prompt(*moved()))
    assert plan.admissions[1].tier == "none"
    assert f"it would be near, the policy's minimum is {minimum}" in plan.admissions[1].reason


def test_prefills_behind_approximate_kv_are_no_longer_exact(store):
    backbone = family(NAME)
    d, b, _, question = moved()
    one = reuser(backbone, store, LOOSE, calibration=calibration(backbone))
    plan = one.prepare(prompt(d, b, words(40, 11), question))
    later_of(backbone).flush()
    stored = len(store.ls())
    done = plan.run()
    later_of(backbone).flush()
    assert [a.tier for a in done.admissions] == ["none", "approximate", "none"]
    assert [a.guarantee for a in plan.admissions] == [s.guarantee for s in done.window.slots]
    assert done.window.slots[2].guarantee == "near"
    assert len(store.ls()) - stored == 1  # the first segment's canonical, no KV of a wrong left context


def test_a_foreign_calibration_is_refused():
    backbone = family(NAME)
    for field, value in (("fingerprint", "0" * 64), ("dtype", "float16"), ("vocabulary", "other")):
        with pytest.raises(CertificateMismatch, match=f"its {field} is"):
            reuser(backbone, calibration=calibration(backbone, **{field: value}))
    old = calibration(backbone, versions={"kamera": "0.0.0"})
    with pytest.raises(CertificateMismatch, match="it was measured with kamera"):
        reuser(backbone, calibration=old)


def test_a_calibration_survives_its_file_and_no_edit(tmp_path):
    backbone = family(NAME)
    made = calibration(backbone)
    path = made.write(tmp_path)
    assert Calibration.read(path) == made
    reuser(backbone, calibration=path)
    document = json.loads(path.read_text())
    document["calibration"]["threshold"] = -2.0
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidCertificate, match="was changed after it was written"):
        reuser(backbone, calibration=path)
    for text in ("{}", "no json", json.dumps({**document, "format": 7})):
        path.write_text(text)
        with pytest.raises(InvalidCertificate, match="calibrate again"):
            Calibration.read(path)
    with pytest.raises(InvalidCertificate, match="no calibration at"):
        Calibration.read(tmp_path / "none.json")


def test_the_probe_is_one_for_exact_kv_and_less_for_other():
    backbone = family(NAME)
    before, other, segment = words(50, 20), words(51, 20), words(52, 10)

    def behind(left: torch.Tensor):
        places = backbone.positions([torch.cat([left, segment])], [{}])
        kv = backbone.prefill(Encoded(left, {}, {}), places[:, :20])
        live = backbone.live()
        live.show([Span(kv, None, (0,) * backbone.axes)], room=10)
        return kv, backbone.prefill(Encoded(segment, {}, {}), places[:, 20:], live), places[:, 20:]

    context, exact, places = behind(before)
    _, wrong, _ = behind(other)
    assert float(likeness(backbone, Encoded(segment, {}, {}), places, context, exact).min()) > 1 - 1e-6
    found = likeness(backbone, Encoded(segment, {}, {}), places, context, wrong)
    assert found.shape == (3, 2)
    assert float(found[0].min()) > 1 - 1e-6  # nothing precedes the first layer's KV
    assert float(found[1:].min()) < 0.999


def test_the_guard_judges_the_copy_with_the_longest_equal_context():
    """The patch that differs least as a set is another one: it has both antecedents, in another order."""
    backbone, store = family(NAME), ChunkStore.open("memory://")
    a, b, c, d, question = parts()
    for behind in ((b, a), (d, words(60, 8), b)):
        reuser(backbone, store).prepare(prompt(*behind, c, question)).run()
    guarded = calibration(backbone, windows=(0, 0, len(b)))
    plan = reuser(backbone, store, LOOSE, calibration=guarded).prepare(prompt(a, b, c, question))
    assert [a.tier for a in plan.admissions][2] == "approximate"
    done = plan.run()
    assert [a.tier for a in done.admissions][2] == "approximate"
    antecedents = done.window.slots[2].antecedents
    assert len(antecedents) == 3 and antecedents[-1] == done.window.slots[1].chunk_id  # d, the words, b


def test_equal_left_counts_from_the_segment_backwards():
    assert equal_left(["x", "b", "c"], ["a", "b", "c"], [5, 7, 9]) == 16
    assert equal_left(["x", "b", "d"], ["a", "b", "c"], [5, 7, 9]) == 0
    assert equal_left(["c"], ["a", "c"], [9]) == 9
    assert equal_left([], ["a"], []) == 0
