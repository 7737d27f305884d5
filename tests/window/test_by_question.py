"""Recall by question: on the backbone that binds, held against asking behind each chunk in a window alone."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.errors import UnknownChunk
from kamera.store import StoreAdmin

SEED = 7_000


@pytest.fixture(scope="module")
def backbone():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def episode():
    return testbed.World(SEED).episode(0, layout="LILPL")


def window_of(backbone, store, frames=()):
    window = KameraWindow(
        backbone, store, testbed.SYSTEM, policy=ReusePolicy(certified=False, forms="always")
    )
    for frame in frames:
        window.append(frame.content)
    return window


@pytest.fixture(scope="module")
def seen(backbone, episode):
    """A window of which everything but the last frame has left."""
    window = window_of(backbone, ChunkStore.open("memory://"), episode.frames)
    window.slide(4)
    return window


def glyph_of(episode):
    """A question that one frame answers, and it has left."""
    return next(q for q in episode.questions if q.kind == "glyph")


def test_scores_are_certainties_behind_each_chunk_alone(backbone, episode, seen):
    text = glyph_of(episode).text
    expected = {}
    for frame in episode.frames:
        alone = window_of(backbone, ChunkStore.open("memory://"), [frame])
        expected[alone[0].chunk_id] = float(alone.next_token_logits(text).float().softmax(-1).max())
    with backbone.measure() as work:
        hits = seen.search(question=text, k=9)
    assert {hit.chunk_id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-4)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert (work.vision_encodes, work.forwards) == (0, 5)


def test_the_frame_that_answers_comes_back(backbone, episode, seen):
    question = glyph_of(episode)
    branch = seen.fork()
    assert episode.answer(question, [4]) is None
    report = branch.recall(question=question.text)
    assert report.slot.chunk_id == backbone.chunk(episode.frames[1].content).id
    assert branch.generate(question.text, max_new_tokens=1) == question.answer
    assert report.vision_encodes == 0 and any("certainty" in note for note in report.notes)


def test_a_chunk_in_view_stays_where_it_is(seen, episode):
    branch = seen.fork()
    branch.recall(question=glyph_of(episode).text)
    before = branch.slots
    branch.recall(question=glyph_of(episode).text)
    assert branch.slots == before


def test_nothing_archived_is_refused_by_name(backbone):
    window = window_of(backbone, ChunkStore.open("memory://"))
    with pytest.raises(UnknownChunk, match="nothing to recall"):
        window.recall(question="glyph of tag 11?")
    assert window.search(question="glyph of tag 11?") == []


def test_one_way_of_looking_back_at_a_time(seen):
    with pytest.raises(ValueError, match="one of the three"):
        seen.recall("a" * 64, question="glyph of tag 11?")
    with pytest.raises(ValueError, match="one of the two"):
        seen.search()
    with pytest.raises(ValueError, match="at least 1"):
        seen.search(question="glyph of tag 11?", k=0)


def test_a_chunk_that_cannot_be_read_is_left_out(backbone, episode):
    window = window_of(backbone, ChunkStore.open("memory://"), episode.frames[:3])
    text = glyph_of(episode).text
    best, *others = window.search(question=text, k=3)
    StoreAdmin(window.store).forget(best.chunk_id)
    assert [hit.chunk_id for hit in window.search(question=text, k=3)] == [hit.chunk_id for hit in others]
