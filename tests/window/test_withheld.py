"""A window serves what its certificate found safe, and brings the rest by other means."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import CertificateMismatch, UncertifiedBackbone
from kamera.window import Arrange, keep_orbit, terms_in_force
from tests.window.certificates import ALL_SAFE, but, certificate, finding
from tests.window.rig import guarantees, is_a_reprefill, make, rig

RANK = 64
CERTIFIED = ReusePolicy(rank=RANK, certified=True, tolerance=None, forms="always")
NO_SURVIVORS = replace(CERTIFIED, certified=False, withheld=frozenset({"survivor"}))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The only directory certificates are looked for in."""
    monkeypatch.setenv("KAMERA_CERTIFICATES", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


def under(pieces, findings, policy=CERTIFIED, *, match: str = "", **options) -> KameraWindow:
    """A window under a certificate of these findings; it warns in the words of ``match``, or not at all."""
    backbone, _ = pieces
    held = certificate(backbone, RANK, findings=findings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        window = make(backbone, policy=policy, certificate=held, **options)
    said = [str(w.message) for w in told if issubclass(w.category, UncertifiedBackbone)]
    assert len(said) == bool(match) and match in "".join(said), said
    return window


# -- survivors -------------------------------------------------------------------------------------


def test_survivors_that_are_safe_are_kept_without_a_forward(pieces):
    _, (a, b, c, _) = pieces
    window = under(pieces, ALL_SAFE)
    for chunk in (a, b, c):
        window.append(chunk)
    assert window.slide().forwards == 0
    assert guarantees(window) == ["survivor", "survivor"]


def test_survivors_that_are_not_safe_are_repaired_and_said_so_once(pieces):
    _, (a, b, c, d) = pieces
    found = but("survivor", "unsafe", "it still knows what has left")
    window = under(pieces, found, match='withholds survivor KV (its verdict on "survivor" is "unsafe"')
    under(pieces, found)  # a second window says it no more
    assert terms_in_force(window).served.withheld == {"survivor"} and terms_in_force(window).served.admits(
        "patched"
    )
    for chunk in (a, b, c, d):
        window.append(chunk)
    report = window.slide()
    assert report.forwards > 0 and report.vision_encodes == 0
    assert "survivor" not in guarantees(window)
    assert is_a_reprefill(window, [b, c, d])
    window.evict(1)
    assert "survivor" not in guarantees(window)
    assert is_a_reprefill(window, [b, d])


def test_a_repaired_window_comes_without_a_forward_the_second_time(pieces):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    make(backbone, store, a, b, c, policy=NO_SURVIVORS).slide()
    again = make(backbone, store, a, b, c, policy=NO_SURVIVORS)
    assert again.plan_slide().cost.forwards == 0
    assert again.slide().forwards == 0
    assert guarantees(again) == ["exact", "patched"]
    assert is_a_reprefill(again, [b, c])


def test_a_window_too_small_repairs_what_stays_by_itself(pieces):
    backbone, (a, b, c, _) = pieces
    room = 4 + b.num_tokens + c.num_tokens
    window = make(backbone, None, a, b, c, policy=NO_SURVIVORS, max_tokens=room)
    assert guarantees(window) == ["exact", "exact"]
    assert is_a_reprefill(window, [b, c])


def test_arrange_repairs_what_it_may_not_keep(pieces):
    backbone, (a, b, c, _) = pieces
    window = make(backbone, None, a, b, c, policy=NO_SURVIVORS)
    window.run(Arrange([*window.slots[1:]], on_leave="keep"))
    assert "survivor" not in guarantees(window)
    assert is_a_reprefill(window, [b, c])


def test_a_saved_survivor_is_repaired_where_it_is_safe_no_more(pieces, folder):
    backbone, (a, b, c, _) = pieces
    store = ChunkStore.open("memory://")
    window = make(backbone, store, a, b, c, policy=CERTIFIED, certificate=certificate(backbone, RANK))
    window.slide()
    window.save(folder / "saved")
    found = certificate(backbone, RANK, findings=but("survivor", "cannot tell", "too few"))
    with pytest.warns(UncertifiedBackbone, match="too few"):
        again = KameraWindow.load(folder / "saved", backbone, store, certificate=found)
    assert (guarantees(window), guarantees(again)) == (["survivor"] * 2, ["exact", "exact"])
    assert is_a_reprefill(again, [b, c])


# -- patches ---------------------------------------------------------------------------------------


def test_patches_that_are_not_safe_are_not_served(pieces):
    backbone, (a, b, *_) = pieces
    store = ChunkStore.open("memory://")
    make(backbone, store, a, b)
    window = under(
        pieces, but("patched", "cannot tell", "blind to it"), store=store, match="withholds patched"
    )
    for chunk in (a, b):
        window.append(chunk)
    assert guarantees(window) == ["exact", "exact"]
    assert window.slide().forwards == 0, "survivors are safe"


@pytest.mark.parametrize("guarantee", ["orbit", "near"])
def test_orbit_and_near_patches_obey_a_finding_of_their_own(pieces, guarantee):
    _, (a, b, c, _) = pieces
    policy = replace(CERTIFIED, minimum=guarantee, max_divergence=0.5 if guarantee == "near" else None)

    def served(window: KameraWindow) -> str:
        for chunk in (a, b, c):
            window.append(chunk)
        if guarantee == "orbit":
            keep_orbit(window, 2)
        else:
            window.evict(1)
        window.reorder([1, 0, 2] if guarantee == "orbit" else [0, 1])
        if guarantee == "near":
            window.evict(1)
            return window.recall(c.id).slot.guarantee
        return window.slots[-1].guarantee

    assert served(under(pieces, ALL_SAFE, policy)) == guarantee
    denied = but(guarantee, "unsafe", f"no {guarantee}")
    assert served(under(pieces, denied, policy, match=f"no {guarantee}")) in ("exact", "patched")


def test_near_patches_serve_no_further_than_they_were_measured(pieces):
    policy = replace(CERTIFIED, minimum="near", max_divergence=0.75)
    window = under(pieces, ALL_SAFE, policy, match="up to a divergence of 0.5, the policy takes 0.75")
    assert terms_in_force(window).served.withheld == {"near"}


def test_blind_reuse_is_never_certified(pieces):
    blind = replace(CERTIFIED, on_miss="blind")
    window = under(pieces, ALL_SAFE, blind, match='did not ask about "blind"')
    assert terms_in_force(window).served.on_miss == "prefill" and terms_in_force(window).served.withheld == {
        "blind"
    }


def test_a_certificate_that_finds_nothing_safe_is_refused(pieces):
    backbone, _ = pieces
    held = certificate(backbone, RANK, findings={"survivor": finding("unsafe", "it knows")})
    with pytest.raises(CertificateMismatch, match='did not ask about "patched"'):
        make(backbone, policy=CERTIFIED, certificate=held)


# -- policies --------------------------------------------------------------------------------------


def test_policies_by_name_say_what_they_serve():
    exact, balanced, streaming = ReusePolicy.exact(), ReusePolicy.balanced(), ReusePolicy.streaming()
    assert not exact.admits("patched") and not exact.keeps("survivor")
    assert balanced.certified and balanced.admits("patched") and not balanced.admits("orbit")
    assert not streaming.certified and streaming.keeps("survivor") and not streaming.admits("near")


def test_a_policy_withholds_what_its_minimum_admits():
    policy = ReusePolicy(minimum="near", on_miss="blind", withheld=["orbit", "blind"], forms="always")
    assert [g for g in ("exact", "patched", "orbit", "near", "blind") if policy.admits(g)] == [
        "exact",
        "patched",
        "near",
    ]
    assert ReusePolicy(**json.loads(json.dumps(policy.to_info()))) == policy
    assert policy.without({"patched"}).withheld == {"orbit", "blind", "patched"}
    for wrong in ("exact", "perfect"):
        with pytest.raises(ValueError, match=f"withheld '{wrong}' is none of patched, "):
            ReusePolicy(withheld=[wrong], forms="always")
