"""The envelope: how far two sets of antecedents are apart, and which stored patch is nearest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamera.patches.near import ALIKE_ABOVE, disorder, divergence, likeness, nearest
from kamera.store import Context, ObjectInfo
from kamera.store.search.embedding import unit_vector

sets = st.lists(st.sampled_from("abcdef"), max_size=5)
twins = {("a", "b"): 0.9, ("c", "d"): 0.5}


def alike(one: str, other: str) -> float:
    return twins.get((one, other), twins.get((other, one), 0.0))


def patch(antecedents: str, created: float = 0.0, kind: str = "exact") -> ObjectInfo:
    return ObjectInfo("k", kind, "x", Context("f", "a"), tuple(antecedents), 1, 1, "exact", 1, created)


@given(sets, sets)
def test_divergence_is_a_distance_that_a_likeness_only_lessens(these, those):
    plain, soft = divergence(these, those), divergence(these, those, alike)
    assert 0.0 <= soft <= plain <= 1.0
    assert (plain == 0.0) == (sorted(these) == sorted(those)) == (soft == 0.0)
    assert soft == pytest.approx(divergence(those, these, alike))


@pytest.mark.parametrize(
    ("these", "those", "expected"),
    [
        ("abc", "abc", 0.0),
        ("xyb", "xya", 1 - 2.9 / 3.1),  # one picture in another file
        ("bd", "ac", 1 - 1.4 / 2.6),
        ("xa", "xb" * 2, 1 - 1.9 / 4.1),  # one chunk stands for one only
        ("xy", "zw", 1.0),
        ("", "a", 1.0),
    ],
)
def test_pictures_that_look_alike_count_as_partly_the_same(these, those, expected):
    assert divergence(these, those, alike) == pytest.approx(expected)


@given(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5), st.permutations("abcdef"))
def test_disorder_is_the_share_of_pairs_that_changed_places(these, those):
    pairs = list(itertools.combinations(these, 2))
    turned = sum(those.index(x) > those.index(y) for x, y in pairs)
    assert disorder(these, those) == (turned / len(pairs) if pairs else 0.0)


def test_another_order_lowers_the_rank_not_the_distance():
    stored = [patch("acb", 1), patch("cba", 2), patch("acb", 3), patch("abx", 4), patch("xyz", 5)]
    assert [n.patch.created for n in nearest(stored, "abc", 1.0)] == [3, 1, 2, 4, 5]
    assert [n.patch.created for n in nearest(stored, "abc", 0.0)] == [3, 1, 2]
    twin = [patch("cba"), patch("ab" + "d")]  # c and d look half alike: nearer than all reversed
    assert nearest(twin, "abc", 0.5, alike)[0].patch.antecedents == ("a", "b", "d")
    assert nearest([patch("cba", 1, "orbit"), patch("acb", 2)], "abc", 0.0)[0].patch.kind == "orbit"
    assert [n.divergence for n in nearest([patch("ab")], "aa", 1.0, alike)] == pytest.approx([1 - 1.9 / 2.1])


def test_similarity_uses_stored_pictures_and_ends_at_zero():
    class Stored:
        def embedding(self, context, chunk):
            held = {"a": [1.0, 0.0], "b": [1.0, 0.1], "c": [0.0, 1.0]}
            return unit_vector(np.array(held[chunk])) if chunk in held else None

    like = likeness(Stored(), Context("f", "a"))
    cosine = 1 / np.sqrt(1.01)
    assert like("a", "b") == pytest.approx((cosine - ALIKE_ABOVE) / (1 - ALIKE_ABOVE), abs=1e-4)
    assert like("a", "c") == like("a", "text") == like("text", "text too") == 0.0
    assert like("a", "a") == pytest.approx(1.0)
