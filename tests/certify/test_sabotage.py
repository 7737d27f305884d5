"""A build with something wrong is never found safe, and a probe that cannot see it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera import ReusePolicy, testbed
from kamera.certify import certify, probe, run
from kamera.certify.kv import KVComparison
from kamera.certify.sabotage import SABOTAGES, sabotages
from kamera.certify.trials import Trials
from kamera.engines.hf import HfEngine
from lab.sabotage.builds import builds
from lab.testbed import load

SCENES = 2
"""Of 20 questions each: as few as let a sound build be found safe."""

EVERYWHERE = {"wrong theta, everywhere", "no rotation, everywhere"}
"""Builds that form patches in the frame they serve them in: at that place the patch makes up for it."""


@pytest.fixture(scope="module")
def trained():
    return HfEngine(*testbed.load())


def certified(backbone: HfEngine, items: int = 20 * SCENES):
    return certify(backbone, probe="world", items=items, guarantees=["patched"])


def trials(backbone: HfEngine) -> Trials:
    return Trials(backbone, next(run.scenes_of("world")), ReusePolicy(certified=False, forms="always"))


def unseen(asked: Trials) -> list[str]:
    """Faults that the KV of windows does not tell."""
    faults = sabotages(asked.backbone.axes)
    assert len(faults) == len(SABOTAGES) - (0 if asked.backbone.axes == 3 else 3)
    return [name for name in faults if not asked.compare_sabotage(name).flaw]


@pytest.fixture(scope="module")
def asked(trained):
    return trials(trained)


def test_a_sound_build_is_safe_and_every_wrong_one_is_seen(trained, monkeypatch):
    monkeypatch.setattr(probe, "PER_TRIAL", 20)
    made = certified(trained)
    found = made.findings["patched"]
    assert found.verdict == "safe", found.reason
    assert set(made.sabotages) == set(SABOTAGES)
    assert {wrong.verdict for wrong in made.sabotages.values()} == {"unsafe"}


def test_the_kv_of_windows_tells_every_fault_in_every_precision():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        asked = trials(HfEngine(*load("mla", dtype=dtype)))
        sound = asked.compare() & asked.compare_after_moves() & asked.compare_survivors()
        assert (sound.flaw, sound.lack) == ("", ""), dtype
        assert asked.backbone.axes == 1 and unseen(asked) == [], dtype


@pytest.mark.parametrize(("scale", "told"), [(0.97, True), (0.995, False), (1.03, True)])
def test_the_scale_of_a_patch_is_told_within_two_percent(asked, monkeypatch, scale, told):
    monkeypatch.setattr("kamera.certify.sabotage.SCALE", scale)
    found = asked.compare_sabotage("patch scaled")
    assert bool(found.flaw) == told
    assert not told or "of its scale" in found.flaw


def test_each_axis_alone_is_told_in_half_precision():
    asked = trials(HfEngine(*load("gqa", dtype=torch.bfloat16)))
    assert asked.compare().flaw == ""
    assert asked.backbone.axes == 3 and unseen(asked) == []


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_wrong_build_has_a_flaw_by_which_no_certificate_is_safe(trained, monkeypatch, kernels):
    """The table in short: `python -m lab.sabotage.certificates` asks 120 questions a guarantee.

    What can be wrong in a kernel is also what a sound build's certificate is tried with (above).
    """
    monkeypatch.setattr("lab.sabotage.builds.SCENES", 1)
    flaws = {}
    for name, build in builds(trained).items():
        if name.endswith(", in the kernels") is kernels:
            with build():
                flaws[name] = run._flaw(trained) or trials(trained).compare().flaw
    assert len(flaws) > 10
    assert [name for name, flaw in flaws.items() if not flaw] == []


@pytest.mark.slow  # the same builds have been asked with their proofs, above
def test_windows_tell_a_wrong_build_without_a_proof_on_tokens(trained, monkeypatch):
    monkeypatch.setattr("lab.sabotage.builds.SCENES", 1)
    missed = []
    for name, build in builds(trained).items():
        with build():
            asked = trials(trained)
            means = (asked.compare, asked.compare_survivors, asked.compare_after_moves)
            told = any(compare().flaw for compare in means)
        missed += [] if told else [name]
    assert set(missed) <= EVERYWHERE


@pytest.mark.parametrize("name", sorted(EVERYWHERE))
def test_a_rotation_that_is_wrong_everywhere_is_proved_to_be(trained, name):
    assert run._flaw(trained) == ""
    with builds(trained)[name]():
        assert "relocation is off by" in run._flaw(trained)


def test_a_flaw_ends_the_probe_with_its_first_scene(trained, monkeypatch):
    """Here one that windows alone show; below one of the operator."""
    monkeypatch.setattr(probe, "PER_TRIAL", 2)
    with builds(trained)["layer dropped, when it is formed"]():
        assert run._flaw(trained) == ""
        made = certify(trained, probe="world", items=120)
    assert made.findings.keys() == probe.TRIALS.keys()
    assert {finding.verdict for finding in made.findings.values()} == {"unsafe"}
    assert max(finding.n for finding in made.findings.values()) == probe.PER_TRIAL
    assert made.sabotages == {}


def test_of_two_comparisons_the_worse_holds():
    sound, other = KVComparison(), KVComparison("torn", "much")
    assert sound & other == other & sound == other
    assert KVComparison(flaw="first") & other == KVComparison("first", "much")


def test_a_scene_without_a_question_about_a_guarantee_does_not_end_a_flawed_probe(trained, monkeypatch):
    draw = run.PROBES["world"]

    def silent_at_first(seed, index):
        scene = draw(seed, index)
        return scene if index else replace(scene, queries={**scene.queries, "orbit": ()})

    monkeypatch.setitem(run.PROBES, "world", silent_at_first)
    monkeypatch.setattr(probe, "PER_TRIAL", 2)
    with builds(trained)["patch scaled, in the kernels"]():
        assert run._flaw(trained)
        made = certify(trained, probe="world", items=120, guarantees=["orbit"])
    assert made.findings["orbit"].n > 0
    assert {finding.verdict for finding in made.findings.values()} == {"unsafe"}
