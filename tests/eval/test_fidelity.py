"""The headline, on the shipped backbone: what reuse loses, and that a small patch brings it back."""

import pytest

from kamera import Backbone, testbed
from kamera.eval.demo import Demo, run_demo
from kamera.eval.fidelity import Fidelity, measure


@pytest.fixture(scope="module")
def backbone():
    return Backbone(*testbed.load())


def check(table: Fidelity, n: int) -> None:
    rows = {(s.operation, s.kind, s.arm): s for s in table.scores}
    patch = f"patch, rank {table.rank}"
    for operation in ("recall", "reorder", "turnover"):
        ideal, blind, kamera = (
            rows[(operation, "two-hop", arm)] for arm in ("re-prefill", "blind reuse", patch)
        )
        assert kamera.n >= n
        assert ideal.accuracy.mean >= 0.95 - 1.0 / n
        assert blind.accuracy.mean <= 0.25  # chance is 1/16
        assert kamera.accuracy.mean >= ideal.accuracy.mean - 0.01 - 1.0 / n
        assert kamera.eta >= 0.99
        single = rows[(operation, "one-hop in the frame", "blind reuse")]
        assert single.accuracy.mean >= 0.95  # what is read out of the frame itself survives
    stale = rows[("turnover", "two-hop", "stale patch")]
    fresh = rows[("turnover", "two-hop", patch)]
    assert stale.accuracy.mean < fresh.accuracy.mean - 0.2
    assert stale.eta < fresh.eta


def test_the_patch_restores_the_loss_of_recall_and_reorder(backbone):
    *_, table = measure(backbone, items=12, per_episode=12, seed=1)
    check(table, 12)


@pytest.mark.slow
def test_patch_restores_what_blind_reuse_loses_on_500_items(backbone):
    *_, table = measure(backbone, items=500, rank=16)
    check(table, 500)


def test_the_demo_is_right_after_every_operation_and_cheaper(backbone, tmp_path):
    *steps, demo = run_demo(tmp_path, clips=1, per_kind=4, backbone=backbone)
    assert isinstance(demo, Demo) and steps
    assert (tmp_path / "clip0.mp4").stat().st_size > 0
    rows = {(r.operation, r.arm): r for r in demo.rows}
    for operation in ("slide", "recall", "reorder"):
        survivor, repair, ideal = (rows[(operation, arm)] for arm in ("survivor", "repair", "re-prefill"))
        assert survivor.forwards == survivor.vision_encodes == repair.vision_encodes == 0
        assert ideal.forwards >= 3 and ideal.vision_encodes >= 3
        assert repair.two_hop >= ideal.two_hop - 0.26  # one item of four
        assert (repair.forwards > 0) is (operation == "slide")
    slid = rows[("slide", "survivor")]
    assert slid.two_hop < rows[("slide", "repair")].two_hop, "a survivor still knows what has left"
    assert "survivor" in dict((o, g) for o, arm, g in demo.guarantees if arm == "survivor")["slide"]
    assert all("survivor" not in guarantees for _, arm, guarantees in demo.guarantees if arm == "repair")
