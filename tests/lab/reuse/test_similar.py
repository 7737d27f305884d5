"""Likeness proposes and never decides."""

from __future__ import annotations

import sys

import pytest

from kamera.reuse import Hit
from lab.reuse.similar import Proposal, SimilarIndex
from lab.reuse.words import canonical, word_ids

PASSAGE = " ".join(
    f"Step {i}: open the {['red', 'blue', 'green'][i % 3]} valve no. {i * i}" for i in range(30)
)
OTHER = " ".join(
    f"Chapter {i} tells of a {['king', 'queen', 'knave'][i % 3]} in {i * 7} lands" for i in range(30)
)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Hello   WORLD\n\tagain", "hello world again"),
        ("at 2026-11-22T10:11:12.345Z done", "at 2025-01-02 03:04 done"),
        ("run 3f2504e0-4f89-11d3-9a0c-0305e82c3301 ok", "run 9b2a04e0-4f89-11d3-9a0c-0305e82cffff ok"),
        ("commit deadbeef01 and call_8fk2x9", "commit 0123456789ab and call_17ab99"),
        ("the clock says 10:15", "the clock says 23:59:59"),
    ],
)
def test_volatile_parts_are_masked(left, right):
    assert canonical(left) == canonical(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [("pay 300 euro", "pay 400 euro"), ("do not open", "do open"), ("port 8080", "port 9090")],
)
def test_what_means_something_is_not_masked(left, right):
    assert canonical(left) != canonical(right)


def test_word_ids_are_the_same_in_every_process():
    assert word_ids("A cat, a cat\n") == [275094093, 186315820, *word_ids(", a"), 186315820, *word_ids("\n")]


def test_a_near_equal_text_is_proposed_with_its_likeness():
    index = SimilarIndex()
    index.add("passage", PASSAGE)
    index.add("other", OTHER)
    (found,) = index.propose(PASSAGE.replace("no. 225", "no. 226").upper())
    assert found.key == "passage"
    assert 0.8 < found.similarity < 1.0
    assert index.propose(PASSAGE)[0].similarity == 1.0
    assert index.propose("nothing of the kind") == ()


def test_the_likelier_left_context_comes_first():
    index = SimilarIndex()
    index.add("behind other", PASSAGE, left=OTHER)
    index.add("behind nothing", PASSAGE)
    index.add("behind passage", PASSAGE, left=PASSAGE)
    assert next(p.key for p in index.propose(PASSAGE, left=OTHER)) == "behind other"
    first, *_, last = index.propose(PASSAGE)
    assert (first.key, first.left, last.left) == ("behind nothing", 1.0, 0.0)


def test_a_proposal_is_no_hit():
    assert not issubclass(Proposal, Hit)
    (found,) = _one().propose(PASSAGE)
    assert not hasattr(found, "segment")
    assert not hasattr(found, "start")


def test_the_limit_and_the_threshold_hold():
    index = SimilarIndex(threshold=0.95)
    for number in range(5):
        index.add(str(number), PASSAGE)
    assert len(index.propose(PASSAGE, limit=3)) == 3
    assert index.propose(PASSAGE[: len(PASSAGE) // 2]) == ()


@pytest.mark.parametrize(
    "wrong", [{"threshold": 0.0}, {"threshold": 1.1}, {"shingle": 0}, {"left_tokens": 0}]
)
def test_wrong_settings_are_a_value_error(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        SimilarIndex(**wrong)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ImportError, match="pip install rensa"):
        SimilarIndex()


def _one() -> SimilarIndex:
    index = SimilarIndex()
    index.add("passage", PASSAGE)
    return index
