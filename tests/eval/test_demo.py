"""The demo's table, on the shipped backbone."""

from kamera.eval.demo import Demo, run_demo


def test_the_demo_is_right_after_every_operation_and_cheaper(tmp_path):
    *steps, demo = run_demo(tmp_path, clips=1, per_kind=4)
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
