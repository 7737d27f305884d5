"""Three regimes of one world: what is shown again, and questions only the order of frames answers."""

import hashlib
import itertools

import numpy as np
import pytest

from kamera.testbed import COLOURS, GLYPHS, World
from kamera.testbed.world import ORDER_KINDS, question_text
from lab.testbed.regimes import REGIMES, RepeatingWorld, contested

SHIPPED = "778a2816ba6be53c041cf4d4fa3a5b41e0f02dbff90f9f1e05a478eff0be0589"
"""Of the frames, pixels and questions that the shipped backbones were trained and measured on."""
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("world", [World, RepeatingWorld])
def test_the_shipped_world_is_what_it_was_byte_for_byte(world):
    digest = hashlib.sha256()
    for seed, index, layout in [
        (0, 0, "LLRI"),
        (0, 1, "LPLRIR"),
        (7, 2, "lrLi"),
        (424242, 3, "IRB"),
        (1_000_000, 4, "LLLI"),
    ]:
        episode = world(seed).episode(index, layout=layout)
        for frame in episode.frames:
            stated = (frame.kind, frame.facts, frame.cells, frame.texture, frame.text)
            digest.update(repr(stated).encode())
            digest.update(frame.image.tobytes() if frame.cells else b"")
        digest.update(repr(episode.questions).encode())
    assert digest.hexdigest() == SHIPPED


@pytest.mark.parametrize("regime", REGIMES)
def test_the_first_frame_of_a_kind_is_the_same_in_every_regime(regime):
    shown = RepeatingWorld(3, regime).episode(1, layout="LRIP").frames
    assert shown == RepeatingWorld(3).episode(1, layout="LRIP").frames


def alike(regime, layout):
    """Of the frames that repeat a kind: shares of facts and of cells that are those of the one before."""
    facts, cells = [], []
    for index in range(12):
        one, two = RepeatingWorld(11, regime).episode(index, layout=layout).frames
        facts.append(np.mean([a == b for a, b in zip(one.facts, two.facts, strict=True)]))
        cells.append(np.mean(np.array(one.cells) == np.array(two.cells)))
    return np.mean(facts), np.mean(cells)


@pytest.mark.parametrize("layout", ["LL", "RR", "II"])
def test_frames_override_mostly_agree_or_stand_still(layout):
    assert max(alike("override", layout)) < 0.2
    facts, cells = alike("redundant", layout)
    assert 0.65 < facts < 0.95 and 0.75 < cells < 0.99
    assert alike("static", layout) == (1.0, 1.0)


def test_redundant_frames_drift_and_let_others_in():
    drifted, others = [], []
    for index in range(20):
        one, two = RepeatingWorld(12, "redundant").episode(index, layout="LL").frames
        kept = one.colour_of.keys() & two.colour_of.keys()
        others.append(1 - len(kept) / len(one.facts))
        drifted.append(np.mean([one.colour_of[glyph] != two.colour_of[glyph] for glyph in kept]))
    assert 0.03 < np.mean(others) < 0.15 and 0.03 < np.mean(drifted) < 0.15


def test_what_stands_aside_is_nobodys_earlier_frame():
    for layout in ("LDL", "DLL"):
        frames = RepeatingWorld(6, "static").episode(0, layout=layout).frames
        one, two = (frame for frame, letter in zip(frames, layout, strict=True) if letter == "L")
        assert one == two and one != RepeatingWorld(6, "static").episode(0, layout="D").frames[0]
    free, aside, again = RepeatingWorld(6, "static").episode(0, layout="DLD").frames
    assert len({free, aside, again}) == 3


def test_every_order_of_a_static_window_answers_alike():
    def changed(regime):
        return np.mean(
            [
                episode.answer(question, [2, 1, 0, 3]) != question.answer
                for episode in (RepeatingWorld(1, regime).episode(i, layout="LLLI") for i in range(8))
                for question in episode.questions
            ]
        )

    assert changed("static") == 0.0
    assert 0.0 < changed("redundant") < 0.5 * changed("override")


@pytest.mark.parametrize("regime", REGIMES)
def test_an_items_frame_shown_again_has_the_tags_it_had(regime):
    one, two = RepeatingWorld(2, regime).episode(0, layout="IJ").frames
    assert len(one.glyph_of) == len(two.glyph_of) == 30
    common = one.glyph_of.keys() & two.glyph_of.keys()
    assert len(common) == 30 if regime != "redundant" else 15 < len(common) <= 30
    assert (one == two) is (regime == "static")


@pytest.mark.parametrize("regime", REGIMES)
def test_what_stands_aside_changes_no_value(regime):
    episode = RepeatingWorld(4, regime).episode(0, layout="LDLI")
    assert episode.frames[1].facts
    for tag in episode.frames[3].glyph_of:
        assert episode.ask("value", tag).answer == episode.ask("value", tag, order=[0, 2, 3]).answer
    assert set(episode.frames[1].colour_of).isdisjoint(episode.frames[3].glyph_of.values())


def test_layouts_and_regimes_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="'still'"):
        RepeatingWorld(0, "still")
    with pytest.raises(ValueError, match="J before any items"):
        RepeatingWorld(0).episode(0, layout="LJI")


def slow_order(frames, kind, subject):
    """By walking the window and writing down what each frame says."""
    said = [(i, glyph, colour) for i, f in enumerate(frames) for glyph, colour in f.colour_of.items()]
    about = lambda glyph: [(i, colour) for i, g, colour in said if g == glyph]  # noqa: E731
    if kind == "earlier":
        one, other = divmod(subject, len(GLYPHS))
        places = [about(g)[-1][0] if about(g) else None for g in (one, other)]
        if None in places or places[0] == places[1]:
            return None
        return GLYPHS[one if places[0] < places[1] else other]
    if not about(subject):
        return None
    return COLOURS[about(subject)[0][1]] if kind == "first" else str(len(frames) - 1 - about(subject)[-1][0])


@pytest.mark.parametrize("kind", ORDER_KINDS)
def test_questions_of_order_equal_the_slow_walk_in_every_order(kind):
    episode = RepeatingWorld(8).episode(0, layout="LLLI")
    subjects = [subject for _, subject in episode.subjects([kind])]
    asked = RNG.permutation(subjects)[:12]
    answers = set()
    for size in (1, 3, 4):
        for order in itertools.permutations(range(4), size):
            frames = [episode.frames[i] for i in order]
            for subject in asked:
                want = slow_order(frames, kind, subject)
                if want is None:
                    with pytest.raises(ValueError, match=r"no frame of"):
                        episode.ask(kind, int(subject), order)
                else:
                    answers.add((subject, episode.ask(kind, int(subject), order).answer))
                    assert episode.ask(kind, int(subject), order).answer == want
    assert len(answers) > len(asked), "the order decides"
    assert question_text(kind, int(asked[0])).endswith("?")


def test_another_order_changes_answers_of_contested_subjects():
    episode = RepeatingWorld(9).episode(0, layout="LLIJ")
    for kind, target in (("colour", 1), ("glyph", 3)):
        turned = [target, *(i for i in range(4) if i != target)]
        frame = episode.frames[target]
        subjects = frame.colour_of if kind == "colour" else frame.glyph_of
        flips = {s for s in subjects if episode.ask(kind, s, turned).answer != episode.ask(kind, s).answer}
        assert set(contested(episode, kind, target)) == flips != set()
