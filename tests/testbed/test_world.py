"""The world's truth, held against a slow and obvious reference."""

import itertools

import numpy as np
import pytest

from kamera.testbed import COLOURS, GLYPHS, World, answer
from kamera.testbed.frames import BLANK, DEFAULTS, RGB, stamps


def stated(frame):
    """What a frame states, read cell by cell from its picture, or from its twin's facts."""
    if frame.is_text or frame.kind == "picture":
        return [(f.glyph, f.colour, f.tag, f.target) for f in frame.facts]
    grids = [frame.at_cells(name).reshape(-1) for name in ("glyph", "colour", "tag", "target")]
    return [facts for facts in zip(*(grid.tolist() for grid in grids), strict=True) if facts[0] != BLANK]


def slow_answer(frames, kind, subject):
    """Walk the window from its start; what is shown later overwrites what was shown earlier."""
    painted, meant = dict(enumerate(DEFAULTS)), dict(enumerate(DEFAULTS))
    shown, value, glyph = set(), {}, {}
    for frame in frames:
        before = dict(painted)
        for here, colour, tag, target in stated(frame):
            if frame.kind == "legend":
                painted[here] = meant[here] = colour
                shown.add(here)
            elif frame.kind == "rename":
                meant[here] = before[target]
            elif tag != BLANK:
                glyph[tag], value[tag] = here, meant[here]
    if kind == "colour":
        return COLOURS[painted[subject]] if subject in shown else None
    if subject not in glyph:
        return None
    return GLYPHS[glyph[subject]] if kind == "glyph" else COLOURS[value[subject]]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["LLRI", "LRLI", "LRRI", "LIRI", "LPRIR", "lrI", "LRi", "I", "RB", "LL"])
def test_truth_equals_the_slow_walk_for_every_order_and_subset(layout):
    episode = World(5).episode(0, layout=layout)
    for size in range(1, len(layout) + 1):
        for order in itertools.permutations(range(len(layout)), size):
            frames = [episode.frames[i] for i in order]
            for question in episode.questions[::7]:
                want = slow_answer(frames, question.kind, question.subject)
                assert episode.answer(question, order) == want
                assert answer(frames, question) == want


def test_the_same_seed_and_index_give_the_same_episode():
    one, two = (World(3).episode(9, layout="LRIB") for _ in range(2))
    assert one == two
    assert all(
        np.array_equal(np.asarray(a.image), np.asarray(b.image))
        for a, b in zip(one.frames, two.frames, strict=True)
    )
    assert World(3).episode(10, layout="LRIB") != one
    assert World(4).episode(9, layout="LRIB") != one


@pytest.mark.parametrize("layout", ["LLLI", "LLRI"])
def test_the_order_of_frames_changes_many_answers(layout):
    changed = [
        episode.answer(question, [2, 1, 0, 3]) != question.answer
        for episode in (World(1).episode(i, layout=layout) for i in range(20))
        for question in episode.questions
        if question.kind == "value"
    ]
    assert 0.25 < np.mean(changed) < 0.75


@pytest.mark.parametrize("hops", [2, 3])
def test_a_question_names_the_frames_its_answer_depends_on(hops):
    episodes = (World(2).episode(i, layout="LRLI") for i in range(9))
    episode, bound = next(
        (e, q)
        for e in episodes
        for q in e.questions
        if q.hops == hops
        and len(q.frames) == hops
        and e.answer(q, q.frames[1:]) != q.answer
        and e.answer(q, q.frames[-1:]) != q.answer
    )
    *through, items = bound.frames
    assert [episode.frames[i].kind for i in bound.frames] == ["legend", "rename", "items"][
        -hops:
    ] or hops == 2
    assert episode.answer(bound, bound.frames) == bound.answer, "these frames are enough"
    assert episode.answer(bound, through) is None, "the items frame is needed"
    default = COLOURS[DEFAULTS[episode.frames[items].glyph_of[bound.subject]]]
    assert episode.answer(bound, [items]) == episode.answer(bound, [items, *through]) == default


def test_pixels_tell_glyphs_colours_and_plates_apart():
    for masks in stamps():
        flat = masks.reshape(len(masks), -1)
        distance = (flat[:, None] != flat[None]).sum(-1) + 99 * np.eye(len(flat), dtype=int)
        assert distance[:-1, :-1].min() >= 5
    spread = np.abs(RGB[:, None].astype(int) - RGB[None]).max(-1) + 999 * np.eye(len(RGB), dtype=int)
    assert spread.min() >= 60


def test_every_fact_is_seen_in_the_picture_and_in_the_words():
    for letter in "LRIB":
        frame = World(0).episode(0, layout=letter).frames[0]
        assert set(stated(frame)) == {(f.glyph, f.colour, f.tag, f.target) for f in frame.facts}
    twin = World(0).episode(0, layout="r").frames[0]
    fact = twin.facts[0]
    assert twin.text.startswith(f"glyph {GLYPHS[fact.glyph]} {GLYPHS[fact.target]}\n")
    assert twin.text.count("\n") == len(twin.facts) + 1
