"""Differences are found by content alone, whoever edited the conversation."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.content import Rendered, Segment
from kamera.edits import difference


def rendered(letters: str) -> Rendered:
    """A prompt of one segment a letter; the letter says its length and its tokens."""
    segments, ids = [], []
    for letter in letters:
        length = "abcdefgh".index(letter) + 1
        segments.append(Segment(letter, len(ids), len(ids) + length, "text", "user", (0, 1)))
        ids += [100 * length + k for k in range(length)]
    return Rendered(torch.tensor(ids, dtype=torch.int64), tuple(segments), len(ids))


def _weight(letters: str) -> int:
    return sum("abcdefgh".index(letter) + 1 for letter in letters)


def _heaviest(one: str, other: str) -> int:
    """The tokens of the heaviest common subsequence, by trying all of them."""
    best = 0
    for size in range(len(one) + 1):
        for chosen in itertools.combinations(one, size):
            rest = iter(other)
            if all(letter in rest for letter in chosen):
                best = max(best, _weight("".join(chosen)))
    return best


prompts = st.text("abcde", max_size=7)


@given(prompts, prompts)
def test_kept_segments_are_a_heaviest_common_subsequence(one, other):
    change = difference(rendered(one), rendered(other))
    assert [one[i] for i, _ in change.kept] == [other[j] for _, j in change.kept]
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(change.kept))
    assert _weight("".join(one[i] for i, _ in change.kept)) == _heaviest(one, other)


@given(prompts, prompts)
def test_every_segment_is_kept_moved_removed_or_inserted(one, other):
    change = difference(rendered(one), rendered(other))
    old = [i for i, _ in (*change.kept, *change.moved)] + list(change.removed)
    new = [j for _, j in (*change.kept, *change.moved)] + list(change.inserted)
    assert sorted(old) == list(range(len(one))) and sorted(new) == list(range(len(other)))
    assert all(one[i] == other[j] for i, j in change.moved)
    assert not {one[i] for i in change.removed} & {other[j] for j in change.inserted}
