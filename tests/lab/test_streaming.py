"""Streams: what an exact window and a survivor are equal to, and questions whose truth is recomputed."""

from __future__ import annotations

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.streaming.__main__ import main, run, table
from lab.streaming.stream import FRAMES, HELD_OUT, questions


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def found(backbone):
    names = ("recent", "exact", "streaming_vlm", "survivor", "rekv", "conduit@10%", "kveraser")
    return run(backbone, episodes=1, window=6, most=1, seed=0, names=names, samples=1)


@pytest.mark.slow
def test_exact_slides_are_recent_to_rounding(found):
    """Frames that are prefilled in one forward are summed in another order."""
    assert found["claims"]["exact, largest difference of a logit to recent"] <= 1e-4
    assert found["arms"]["exact"]["encodes a step"] == 1
    assert found["arms"]["recent"]["encodes a step"] == 6


@pytest.mark.slow
def test_a_survivor_is_the_frame_of_streaming_vlm(found):
    assert found["claims"]["survivor, share of answers that are streaming_vlm's"] == 1.0
    assert found["claims"]["survivor, largest difference of KL to streaming_vlm's"] < 1e-3


@pytest.mark.slow
def test_a_frame_that_is_not_turned_would_show(backbone, monkeypatch):
    monkeypatch.setattr("lab.streaming.rivals.relocate_kv", lambda kv, layout, offset: kv)
    names = ("recent", "streaming_vlm", "survivor")
    still = run(backbone, episodes=1, window=6, most=1, seed=0, names=names)
    assert still["claims"]["survivor, largest difference of KL to streaming_vlm's"] > 1e-3


def test_an_unknown_arm_names_those_that_exist(backbone, capsys):
    with pytest.raises(ValueError, match="give recent and others of recent, exact, streaming_vlm"):
        run(backbone, episodes=1, window=6, most=1, seed=0, names=("recent", "cacheblend"))
    with pytest.raises(SystemExit):
        main(["--arms", "recent,cacheblend"])
    assert "arm 'cacheblend' is none of recent, exact" in capsys.readouterr().err


def test_every_kind_of_question_has_the_truth_of_its_frames():
    episode = testbed.World(HELD_OUT).episode(0, layout=FRAMES[0])
    asked = questions(episode, seen=8, window=4, most=50, seed=0)
    assert {a.kind for a in asked} == {"stays", "changed", "left"}
    by_text = {episode.ask(kind, subject).text: (kind, subject) for kind, subject in episode.subjects()}
    for question in asked:
        kind, subject = by_text[question.text]
        if question.kind == "left":
            with pytest.raises(ValueError, match="no frame"):
                episode.ask(kind, subject, range(4, 8))
            assert question.truth == episode.ask(kind, subject, range(8)).answer
        else:
            now, ever = (episode.ask(kind, subject, order).answer for order in (range(4, 8), range(8)))
            assert question.truth == now and (now == ever) == (question.kind == "stays")


@pytest.mark.slow
def test_the_table_has_a_line_for_every_arm(found):
    text = table({"command": "c", "commit": "0", "results": found})
    assert all(f"| {name} |" in text for name in found["arms"])
