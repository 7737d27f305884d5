"""The nearest patch by left context is the one that a comparison token by token finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.patches import Near
from kamera.trust import ReusePolicy
from kamera.window import Append
from kamera.window.requests import Newcomer
from kamera.window.steps import Place
from tests.window.test_plan import Fake, Row, decided, limits, standing

LENGTHS = {"a": 3, "b": 5, "c": 2, "d": 7}
POLICY = ReusePolicy(
    certified=False, minimum="near", max_divergence=1.0, nearest="left", tolerance=None, forms="always"
)
contexts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(tuple)


@dataclass
class Stored(Fake):
    """Rows whose divergences are in no relation to left contexts."""

    def near(self, chunk_id, antecedents, limit):
        rows = [Row(a, kind, formed) for (_, a, kind), formed in self.patches.items()]
        return [Near(i / 10, row) for i, row in enumerate(rows)]


def tokens(context: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(name, i) for name in context for i in range(LENGTHS[name])]


def common(these: tuple[str, ...], those: tuple[str, ...]) -> int:
    """Equal tokens before a chunk, one by one; equal tokens of unequal chunks do not occur here."""
    a, b = tokens(these), tokens(those)
    return next((i for i in range(min(len(a), len(b))) if a[-1 - i] != b[-1 - i]), min(len(a), len(b)))


def served(store: Stored, present: tuple[str, ...], policy: ReusePolicy = POLICY) -> tuple[str, ...] | None:
    """Antecedents of the patch with which a chunk is placed behind ``present``; None if prefilled."""
    seats = [replace(seat, length=LENGTHS[seat.chunk_id]) for seat in standing(*present).seats]
    before = replace(standing(*present), seats=tuple(seats))
    made = decided(Append(Newcomer("x", 4), "now"), before, store, policy, limits())
    (step,) = [step for step in made.steps if isinstance(step, Place)] or [None]
    return None if step is None else step.patch.antecedents


@settings(max_examples=200, deadline=None)
@given(
    present=contexts.filter(len), stored=st.lists(contexts.filter(len), min_size=1, max_size=6, unique=True)
)
def test_the_longest_equal_left_context_is_chosen(present, stored):
    if present in stored:
        stored.remove(present)  # served as patched
    if not stored:
        return
    store = Stored({"x"}, {("x", behind, "exact"): "exact" for behind in stored})
    chosen = served(store, present)
    assert common(present, chosen) == max(common(present, behind) for behind in stored)
    turned = Stored({"x"}, dict(reversed(store.patches.items())))
    assert served(turned, present) == chosen  # whatever the order of the rows


def test_ties_go_to_the_better_formation_then_to_the_name():
    rows = {("x", ("d", "b"), "exact"): "patched", ("x", ("c", "b"), "exact"): "exact"}
    assert served(Stored({"x"}, rows), ("a", "b")) == ("c", "b")
    rows[("x", ("b",), "exact")] = "exact"
    assert served(Stored({"x"}, rows), ("a", "b")) == ("b",)


def test_an_orbit_patch_has_no_left_context():
    rows = {("x", ("c", "b"), "orbit"): "exact", ("x", ("d",), "exact"): "exact"}
    assert served(Stored({"x"}, rows), ("a", "b")) == ("d",)
    by_set = replace(POLICY, nearest="set")
    assert served(Stored({"x"}, rows), ("a", "b"), by_set) == ("c", "b")


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="nearest 'right' is none of set, left"):
        ReusePolicy(nearest="right")
