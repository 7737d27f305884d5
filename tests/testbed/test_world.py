"""The world's truth, held against a slow and obvious reference."""

import itertools

import numpy as np
import pytest

from kamera.testbed import COLOURS, GLYPHS, TAGS, World, answer
from kamera.testbed.render import RGB, pixels, stamps
from kamera.testbed.world import BLANK, DEFAULTS, MAX_ITEMS_FRAMES


def slow_answer(frames, kind, subject):
    """Walk the window from its start; what is shown later overwrites what was shown earlier."""
    colour = dict(enumerate(DEFAULTS))
    shown, value, glyph = set(), {}, {}
    for frame in frames:
        for row in range(len(frame.glyphs)):
            for column in range(len(frame.glyphs[0])):
                here = frame.glyphs[row][column]
                if frame.kind == "legend":
                    colour[here] = frame.colours[row][column]
                    shown.add(here)
                elif frame.kind == "items" and here != BLANK:
                    glyph[frame.tags[row][column]] = here
                    value[frame.tags[row][column]] = colour[here]
    if kind == "colour":
        return COLOURS[colour[subject]] if subject in shown else None
    if subject not in glyph:
        return None
    return GLYPHS[glyph[subject]] if kind == "glyph" else COLOURS[value[subject]]


@pytest.mark.parametrize("layout", ["LLLI", "LILI", "LPLIL", "I", "LL"])
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
    one, two = World(3).episode(9), World(3).episode(9)
    assert one == two
    assert all(
        np.array_equal(np.asarray(a.image), np.asarray(b.image))
        for a, b in zip(one.frames, two.frames, strict=True)
    )
    assert World(3).episode(10) != one
    assert World(4).episode(9) != one


def test_the_order_of_legends_changes_many_answers():
    changed = [
        episode.answer(question, [2, 1, 0, 3]) != question.answer
        for episode in (World(1).episode(i) for i in range(20))
        for question in episode.questions
        if question.kind == "value"
    ]
    assert 0.3 < np.mean(changed) < 0.7


def test_a_question_names_the_frames_its_answer_depends_on():
    episode = World(2).episode(0)
    bound = next(question for question in episode.questions if question.bound)
    legend, items = bound.frames
    assert bound.hops == 2
    assert [episode.frames[i].kind for i in (legend, items)] == ["legend", "items"]
    assert episode.answer(bound, [legend, items]) == bound.answer
    assert episode.answer(bound, [legend]) is None
    default = COLOURS[DEFAULTS[episode.frames[items].glyph_of[bound.subject]]]
    assert episode.answer(bound, [items]) == default
    assert episode.answer(bound, [items, legend]) == default


def test_tags_are_unique_in_an_episode_and_wrong_layouts_are_refused():
    episode = World(0).episode(0, layout="I" * MAX_ITEMS_FRAMES)
    tags = [tag for frame in episode.frames for tag in frame.glyph_of]
    assert len(set(tags)) == len(tags) == len(TAGS)
    with pytest.raises(ValueError, match="items frames"):
        World(0).episode(0, layout="I" * (MAX_ITEMS_FRAMES + 1))
    with pytest.raises(ValueError, match="'LX'"):
        World(0).episode(0, layout="LX")
    with pytest.raises(ValueError, match="value of tag"):
        episode.ask("value", episode.questions[0].subject, order=[])


def test_pixels_tell_glyphs_colours_and_tags_apart():
    glyphs, plates = stamps()
    for masks in (glyphs, plates):
        flat = masks.reshape(len(masks), -1)
        distance = (flat[:, None] != flat[None]).sum(-1) + 99 * np.eye(len(flat), dtype=int)
        assert distance.min() >= 5 or distance[:-1, :-1].min() >= 5
    spread = np.abs(RGB[:, None].astype(int) - RGB[None]).max(-1) + 999 * np.eye(len(RGB), dtype=int)
    assert spread.min() >= 60


def test_a_batch_of_frames_is_drawn_like_each_alone():
    frames = [World(0).episode(i).frames[3] for i in range(3)]
    together = pixels(frames)
    assert together.shape == (3, 192, 192, 3) and together.dtype == np.uint8
    for one, frame in zip(together, frames, strict=True):
        assert np.array_equal(one, np.asarray(frame.image))
