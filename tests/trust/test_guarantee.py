"""Guarantees stand in one order, from the strongest to the weakest."""

from __future__ import annotations

import pytest

from kamera.trust import GUARANTEES, at_least, guarantee_named, lacking_bound, outranks, weakest


@pytest.mark.parametrize("i", range(len(GUARANTEES)))
def test_each_is_at_least_itself_and_all_that_are_weaker(i):
    assert [at_least(GUARANTEES[i], other) for other in GUARANTEES] == [
        j >= i for j in range(len(GUARANTEES))
    ]


def test_the_weakest_of_some_is_theirs_and_of_none_is_exact():
    assert weakest(["patched", "blind", "exact"]) == "blind"
    assert weakest([]) == "exact"


def test_an_unknown_name_counts_as_the_weakest():
    assert guarantee_named("better than exact") == guarantee_named(None) == "blind"
    assert outranks("near", "better than exact") and not outranks("better than exact", "blind")


def test_a_patch_may_lack_what_it_says_it_leaves_and_a_tenth_more():
    assert lacking_bound("patched", 0.9) == pytest.approx(0.2)
    assert lacking_bound("patched", None) == lacking_bound("patched", 0.0) == 1.0
    assert lacking_bound("orbit", 0.9) == 1.0 and lacking_bound("blind", 0.9) is None
