"""Windows of the tables: the same for the same seed, and asked what they bind."""

from __future__ import annotations

import pytest

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import prefill_anchor
from kamera.testbed.world import TRAINING_SEEDS
from lab.paper.draw import FITTED, HELD_OUT, MAIN, NEW, TARGET, Stage


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def anchor(backbone):
    return prefill_anchor(backbone, testbed.SYSTEM)


def test_same_seed_same_questions_and_another_seed_others(backbone, anchor):
    def asked(seed: int) -> list[testbed.Question]:
        return Stage(backbone, anchor, seed, 3).questions(MAIN)

    assert asked(5) == asked(5)
    assert asked(5) != asked(6)


def test_questions_are_bound_by_the_window_then_one_hop(backbone, anchor):
    stage = Stage(backbone, anchor, 5, 0)
    order = (NEW[0], *MAIN)
    questions = stage.questions(order)
    multi = [q for q in questions if q.hops > 1]
    assert questions[: len(multi)] == multi and len(questions) > len(multi)
    for question in multi:
        assert question.bound and set(question.frames) <= {*order, TARGET}
        assert question.answer == stage.episode.answer(question, order=(*order, TARGET))


def test_a_twin_states_the_same_facts_in_words(backbone, anchor):
    stage = Stage(backbone, anchor, 5, 0)
    for index in (0, TARGET):
        shown = stage.episode.frames[index]
        assert not shown.is_text and [part["type"] for part in stage.twin(index)] == ["text"]
        assert stage.twin(index) == testbed.Frame(shown.kind, shown.facts).content
        assert stage.content(index) == shown.content


def test_asked_fitted_and_training_episodes_are_disjoint():
    assert FITTED != HELD_OUT and max(FITTED, HELD_OUT) + 1000 < TRAINING_SEEDS
