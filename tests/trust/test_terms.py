"""What a certificate permits is decided from values alone: no model, no store and no folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera.errors import InvalidCertificate
from kamera.ops import PatchBudget
from kamera.trust import Certificate, Estimate, Finding, Grounds, ReusePolicy, permit_of, terms_of

GROUNDS = Grounds("f" * 64, "float32", "", None, PatchBudget(32, 0.03), {"kamera": "0.1.0"})
POLICY = ReusePolicy(certified=True, tolerance=None)
HALF = Estimate(0.5, 0.4, 0.6)


def certificate(**verdicts: str) -> Certificate:
    found = {
        name: Finding(verdict, "by hand", 9, 0.1, HALF, HALF, HALF, None, None)
        for name, verdict in verdicts.items()
    }
    return Certificate("tiny", GROUNDS, "pages", "0" * 64, 0.5, found, {}, "2026-01-01T00:00:00+00:00")


def terms(*files: tuple[str, Certificate | InvalidCertificate], policy: ReusePolicy = POLICY):
    return terms_of(policy, permit_of(GROUNDS, files, "nowhere"), "Tiny", "kamera certify MODEL")


def test_what_is_found_safe_is_served_and_nothing_is_said():
    told = terms(("a.json", certificate(patched="safe", orbit="safe", survivor="safe")))
    assert (told.served, dict(told.reasons), told.warning) == (POLICY, {}, "")


def test_what_is_not_found_safe_is_withheld_by_name():
    told = terms(("a.json", certificate(patched="safe", survivor="cannot tell")))
    assert told.served.withheld == {"survivor"}
    assert "withholds survivor KV" in told.warning and "repaired, by a stored patch" in told.warning


def test_harm_that_one_probe_found_outweighs_what_another_did_not():
    good, bad = certificate(patched="safe", survivor="safe"), certificate(patched="unsafe")
    for files in ([("a", good), ("b", bad)], [("b", bad), ("a", good)]):
        told = terms(*files)
        assert (told.certificate, told.served.withheld) == (good, {"patched"})
        assert told.reasons["patched"].startswith("b: its verdict")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "none of fingerprint ffffffffffff in nowhere"),
        ([("a", InvalidCertificate("a is torn"))], "a is torn"),
        ([("a", certificate())], 'a: its probe did not ask about "patched"'),
        ([("a", certificate(patched="unsafe"))], 'a: its verdict on "patched" is "unsafe": by hand'),
    ],
)
def test_without_a_certificate_that_permits_anything_all_is_exact(files, reason):
    told = terms(*files)
    assert (told.certificate, told.served.minimum) == (None, "exact")
    assert reason in told.warning


def test_patches_of_some_layers_are_other_grounds():
    some = replace(GROUNDS, budget=replace(GROUNDS.budget, layers=(0, 1)))
    said = certificate(patched="safe").difference(some)
    assert said == "it was measured with patches of all layers, the policy corrects layers 0, 1"
    assert certificate(patched="safe").difference(GROUNDS) is None


def test_a_patch_that_proves_itself_needs_no_certificate_unless_one_found_harm():
    proving = ReusePolicy(certified=True)
    assert terms(policy=proving).served.tolerance == proving.tolerance
    harmed = terms(("a", certificate(patched="unsafe")), policy=proving)
    assert harmed.served.minimum == "exact"
