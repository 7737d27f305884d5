"""The stream of pictures that sessions over vLLM are measured on."""

from __future__ import annotations

from kamera.testbed.world import answer_with_frames
from lab.vllm.__main__ import p95, table
from lab.vllm.stream import stream

KEEP = 8


def test_answers_are_those_of_the_pictures_in_view_and_of_all_before():
    turns = stream(40, KEEP, 1)
    frames = [turn.frame for turn in turns]
    for at, turn in enumerate(turns):
        if not turn.text.startswith("value"):
            continue
        subject = int(turn.text.removesuffix("?").split()[-1]) - 10
        view, shown = frames[max(0, at + 1 - KEEP) : at + 1], frames[: at + 1]
        assert (
            answer_with_frames(view, "value", subject)[0]
            == turn.answer
            == answer_with_frames(shown, "value", subject)[0]
        )


def test_bound_questions_ask_about_a_picture_that_came_before_the_last():
    turns = stream(40, KEEP, 2)
    bound = [(at, turn) for at, turn in enumerate(turns) if turn.bound]
    assert len(bound) >= 30
    for at, turn in bound:
        subject = int(turn.text.removesuffix("?").split()[-1]) - 10
        view = [one.frame for one in turns[max(0, at + 1 - KEEP) : at + 1]]
        assert subject not in view[-1].glyph_of and len(answer_with_frames(view, "value", subject)[1]) > 1


def test_streams_of_one_seed_are_equal_and_of_two_are_not():
    assert stream(12, KEEP, 3) == stream(12, KEEP, 3) != stream(12, KEEP, 4)


def test_a_table_has_a_row_for_each_arm_and_sabotage_of_each_run():
    assert p95([float(i) for i in range(100)]) == 95.0
    times = {"ms, median": 1.0, "ms, p95": 2.0, "ratio": 3.0}
    counts = {"forwards": 1, "tokens": 2, "encodes": 3}
    row = {"now": counts, "later": counts, "right": [1, 2]}
    row |= {name: times for name in ("engine, wall", "whole, wall", "engine, processor")}
    run = {"arms": {"survivor": row}, "right when all is stored": {"blind": [0, 2]}}
    lines = table({"runs": [run, run]}).splitlines()
    assert len(lines) == 2 + 2 * 2
    assert all(line.count("|") == lines[0].count("|") for line in lines)
