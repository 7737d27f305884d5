"""The demo's table, on the shipped backbone, as its command gives it."""

import pytest

from tests.cli.run import kamera


@pytest.mark.slow
def test_the_demo_is_right_after_every_operation_and_cheaper(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clips = tmp_path / "clips"
    options = ("--clips", "1", "--questions", "4", "--video", clips, "--quiet", "--format", "json")
    done = kamera(capsys, "demo", *options)
    assert (done.code, done.err) == (0, "")
    demo = done.document
    assert (demo["clips"], demo["view"]) == (1, str(tmp_path / "kamera" / "demo.html"))
    assert (clips / "clip0.mp4").stat().st_size > 0
    rows = {(r["operation"], r["arm"]): r for r in demo["rows"]}
    for operation in ("slide", "recall", "reorder"):
        survivor, repair, ideal = (rows[(operation, arm)] for arm in ("survivor", "repair", "re-prefill"))
        assert survivor["forwards"] == survivor["vision_encodes"] == repair["vision_encodes"] == 0
        assert ideal["forwards"] >= 3 and ideal["vision_encodes"] >= 3
        assert repair["two_hop"] >= ideal["two_hop"] - 0.26  # one item of four
        assert (repair["forwards"] > 0) is (operation == "slide")
    slid = rows[("slide", "survivor")]
    assert slid["two_hop"] < rows[("slide", "repair")]["two_hop"], "a survivor still knows what has left"
    worth = demo["guarantees"]
    assert "survivor" in dict((o, g) for o, arm, g in worth if arm == "survivor")["slide"]
    assert all("survivor" not in guarantees for _, arm, guarantees in worth if arm == "repair")
