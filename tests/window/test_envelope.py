"""The envelope: how far two sets of antecedents are apart, and which stored patch is nearest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamera.patches.near import disorder, divergence
from kamera.store import Context, ObjectInfo

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


@given(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5), st.permutations("abcdef"))
def test_disorder_is_the_share_of_pairs_that_changed_places(these, those):
    pairs = list(itertools.combinations(these, 2))
    turned = sum(those.index(x) > those.index(y) for x, y in pairs)
    assert disorder(these, those) == (turned / len(pairs) if pairs else 0.0)
