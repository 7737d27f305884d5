"""A build with something wrong is never found safe, and a probe that cannot see it says so."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera import Backbone, ReusePolicy, testbed
from kamera.certify import certify, probe, run
from kamera.certify.kv import closed
from kamera.certify.sabotage import SABOTAGES, SHOWN_BY_KV
from kamera.certify.trials import Trials
from kamera.ops import Patch, PatchBudget, RopeSpec, kv_map, rope
from kamera.patches import Former

SCENES = 2
"""Of 20 questions each: as few as let a sound build be found safe."""


@pytest.fixture(scope="module")
def trained():
    return Backbone(*testbed.load())


@pytest.fixture(autouse=True)
def long_scenes(monkeypatch):
    monkeypatch.setattr(probe, "PER_TRIAL", 20)


def patched(backbone: Backbone, patch: pytest.MonkeyPatch | None = None, *arms: str):
    """The certificate's finding about patched KV, and those about builds that are wrong: all, or ``arms``."""
    for name in () if patch is None else SABOTAGES.keys() - set(arms):
        patch.delitem(SABOTAGES, name)
    made = certify(backbone, probe="world", items=20 * SCENES, guarantees=["patched"])
    return made.findings["patched"], made.sabotages


def test_a_sound_build_is_safe_and_every_wrong_one_is_seen(trained):
    found, sabotages = patched(trained)
    assert found.verdict == "safe", found.reason
    assert set(sabotages) == set(SABOTAGES)
    for name, wrong in sabotages.items():
        seen = "cannot tell" if name in SHOWN_BY_KV else "unsafe"
        assert wrong.verdict == seen, f"{name}: {wrong.reason}"
    assert "of what blind reuse lacks in k the served has" in sabotages["K not patched"].reason
    assert min(found.closed.values()) > 0.9


def test_a_build_that_never_turns_keys_is_unsafe(trained, monkeypatch):
    monkeypatch.setattr(RopeSpec, "angles", lambda self, offset: torch.zeros(len(self.inv_freq)).double())
    rope.turn_table.cache_clear()
    try:
        flaw = run._flaw(trained)
        monkeypatch.setattr(run, "_flaw", lambda backbone: None)
        found, _ = patched(trained, monkeypatch, "no rotation", "rotated twice")
    finally:
        rope.turn_table.cache_clear()
    # its patches make up for the turn they were formed without, and the questions say that no turn matters
    assert found.verdict == "cannot tell" and "the probe does not see: " in found.reason
    assert {"no rotation", "rotated twice"} == set(found.reason.partition(": ")[2].split(", "))
    assert flaw is not None and "relocation is off by" in flaw
    overruled = run._overruled({"patched": found}, flaw)["patched"]
    assert (overruled.verdict, overruled.reason, overruled.n) == ("unsafe", flaw, found.n)


def test_a_build_that_leaves_keys_unpatched_is_not_safe(trained, monkeypatch):
    form = PatchBudget._formed

    def without_keys(self, deltas, layout, canonical):
        sized = form(self, deltas, layout, canonical)
        layers = tuple({n: f for n, f in layer.items() if n != "k"} for layer in sized.formed.patch.layers)
        return sized._replace(formed=sized.formed._replace(patch=Patch(layers)))

    monkeypatch.setattr(PatchBudget, "_formed", without_keys)
    found, _ = patched(trained, monkeypatch, "no rotation")
    assert found.verdict == "cannot tell"
    assert "of what blind reuse lacks in k the served has" in found.reason


def test_a_build_that_serves_stale_patches_is_unsafe(trained, monkeypatch):
    policy = ReusePolicy(certified=False, forms="always")
    stale: dict[str, Patch] = {}
    for scene in itertools.islice(probe.PROBES["world"](), SCENES):
        stale |= Trials(trained, scene, policy)._stale
    look_up = Former.patch

    def departed(self, facts, antecedents, kind, formed, base="", proof=None):
        found = look_up(self, facts, antecedents, kind, formed, base, proof)
        return None if found is None else stale[facts.chunk_id]

    monkeypatch.setattr(Former, "patch", departed)
    found, _ = patched(trained, monkeypatch)
    assert found.verdict == "unsafe", found.reason


def test_what_is_closed_is_told_from_what_is_not():
    true = ({"k": torch.randn(1, 5, 4), "v": torch.randn(1, 5, 4)},)
    bare = kv_map(true, lambda t: t + 1.0)
    assert closed([true], [true], [bare]) == {"k": 1.0, "v": 1.0}
    assert closed([bare], [true], [bare]) == {"k": 0.0, "v": 0.0}
    worse = kv_map(true, lambda t: t + 2.0)
    assert closed([worse], [true], [bare])["k"] == pytest.approx(-3.0)
    half = ({"k": true[0]["k"], "v": bare[0]["v"]},)
    assert closed([half], [true], [bare]) == {"k": 1.0, "v": 0.0}
    assert closed([true], [true], [true]) == {"k": 1.0, "v": 1.0}, "nothing lacks, and nothing was added"
