"""The order that is placed runs least: held against all orders, over random libraries of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.engines import PositionLimits
from kamera.errors import PolicyRefused, WindowFull
from kamera.trust import ReusePolicy
from kamera.window import Cost
from kamera.window.plan import plan
from kamera.window.requests import Arrange, Newcomer
from kamera.window.seats import Seat, Seats, Source, Spot
from kamera.window.steps import Limits, Plan, View
from lab.placement import BEAM, EXACT_UP_TO, fitting, placed
from tests.window.test_plan import ANCHOR, Fake

NAMES = "abcdefgh"
LENGTHS = {name: 4 + 3 * i for i, name in enumerate(NAMES)}
POLICIES = {
    "patched": ReusePolicy(certified=False),
    "prefill": ReusePolicy(certified=False, on_miss="prefill"),
    "always": ReusePolicy(certified=False, forms="always"),
    "unproved": ReusePolicy(certified=False, tolerance=None),
    "orbit": ReusePolicy(certified=False, minimum="orbit"),
    "near": ReusePolicy(certified=False, minimum="near", max_divergence=0.5, on_miss="blind"),
    "blind": ReusePolicy(certified=False, minimum="blind"),
    "exact": ReusePolicy.exact(),
}


class Library(Fake):
    """Rows of canonicals, and of patches: behind orders, of orbits, and behind survivors."""

    prefilled: frozenset[tuple] = frozenset()

    def orders(self, chunk_id: str) -> set[tuple[str, ...]]:
        return {behind for chunk, behind, kind in self.patches if chunk == chunk_id and kind == "exact"}

    def patch_within(self, chunk_id, length, antecedents, kind, budget, base=""):
        behind = sorted(antecedents) if kind == "orbit" else antecedents
        return super().patch_within(chunk_id, length, behind, kind, budget, base)

    def near(self, chunk_id, antecedents, limit):
        found = sorted(
            (len({*behind} ^ {*antecedents}) / len({*behind, *antecedents}), behind, kind)
            for chunk, behind, kind in self.patches
            if chunk == chunk_id
        )
        rows = [(d, self.patch_within(chunk_id, 0, b, k, None)) for d, b, k in found if d <= limit]
        return [NearRow(d, row) for d, row in rows]


class NearRow(tuple):
    """As `kamera.patches.Near`."""

    def __new__(cls, distance, row):
        return super().__new__(cls, (distance, row))

    patch = property(lambda self: self[1])


class Line:
    """Chunks of `LENGTHS` one after another."""

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]:
        ends = [*itertools.accumulate((LENGTHS[name] for name in chunk_ids), initial=ANCHOR)]
        return [Spot((start,), (end - 1,)) for start, end in itertools.pairwise(ends)]

    def form(self, chunk_id: str) -> None:
        """Each runs alone."""


def limits(max_tokens: int | None = None, joins: bool = True) -> Limits:
    return Limits(ANCHOR, PositionLimits(), max_tokens, False, Line(), joins=joins)


def new(names: Sequence[str]) -> list[Newcomer]:
    return [Newcomer(name, LENGTHS[name]) for name in names]


def standing(names: Sequence[str], guarantees: Sequence[str]) -> Seats:
    """Chunks of a window, prefilled there, or survivors of one that left."""
    seats = []
    pairs = zip(names, Line().compact(names), guarantees, strict=True)
    for i, (name, spot, worth) in enumerate(pairs):
        behind = tuple(names[:i]) if worth == "exact" else ("gone", *names[:i])
        source = Source(spot, behind, "exact", canonical=False)
        seats.append(Seat(name, LENGTHS[name], spot, source, worth))
    return Seats.home(seats, 1)


def library(random: Random, names: Sequence[str]) -> Library:
    """Rows behind any order of any of the other chunks, as many as chance stores."""
    rows = Library({name for name in names if random.random() < 0.6})
    share, orbits, terms = (random.choice([0.0, 0.15, 0.5, 0.9]) for _ in range(3))
    for target in names:
        others = [name for name in names if name != target]
        for n in range(1, len(names)):
            for behind in itertools.permutations(others, n):
                formed = random.choice(["exact", "exact", "patched", "blind"])
                if random.random() < (max(share, terms) if n < 3 else share):
                    rows.patches[target, behind, "exact"] = "exact" if n < 3 else formed
                if behind == tuple(sorted(behind)) and random.random() < orbits:
                    rows.patches[target, behind, "orbit"] = formed
    return rows


def random_view(random: Random, names: Sequence[str], policy: ReusePolicy) -> View:
    there = random.sample(names, random.choice([0, 0, 1, 2, 3]) % (len(names) + 1))
    worths = [random.choice(["exact", "exact", "survivor"]) for _ in there]
    return View(standing(there, worths), library(random, names), policy, limits(joins=random.random() < 0.5))


def requested(view: View, names: Sequence[str]) -> tuple[int | Newcomer, ...]:
    """Chunks as a request names them: those of the window by index."""
    there = view.seats.chunk_ids
    return tuple(there.index(n) if n in there else Newcomer(n, LENGTHS[n]) for n in names)


def placing(order: tuple[int | Newcomer, ...], view: View) -> Plan:
    return plan(placed(Arrange(order), view), view)


def run_of(cost: Cost) -> tuple[int, int]:
    return cost.tokens, cost.forwards


def cheapest(view: View, names: Sequence[str]) -> tuple[tuple[int, int], tuple[str, ...]]:
    """The slow reference: all orders are planned."""
    tried = []
    for order in itertools.permutations(range(len(names))):
        chunks = [names[i] for i in order]
        try:
            made = plan(Arrange(requested(view, chunks)), view)
        except PolicyRefused:
            continue
        tried.append((run_of(made.cost), order))
    run, order = min(tried)
    return run, tuple(names[i] for i in order)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30, deadline=None)
@given(random=st.randoms(use_true_random=True), count=st.integers(2, 4))
def test_of_all_orders_the_one_that_is_placed_runs_least(policy, random, count):
    view = random_view(random, NAMES[:count], POLICIES[policy])
    made = placing(requested(view, NAMES[:count]), view)
    assert (run_of(made.cost), made.after.chunk_ids) == cheapest(view, NAMES[:count])


@pytest.mark.parametrize("policy", ["patched", "unproved", "always"])
@settings(max_examples=8, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_of_120_orders_the_one_that_is_placed_runs_least(policy, random):
    view = random_view(random, NAMES[:5], POLICIES[policy])
    made = placing(requested(view, NAMES[:5]), view)
    assert (run_of(made.cost), made.after.chunk_ids) == cheapest(view, NAMES[:5])


def test_an_order_that_stands_is_worth_more_than_one_that_is_stored():
    seats = standing("bac", ["exact", "patched", "survivor"])
    rows = Library({"a", "b"}, {("b", ("a",), "exact"): "exact"})
    made = placing((1, 0, 2), View(seats, rows, POLICIES["patched"], limits()))
    assert (made.after.chunk_ids, made.cost.tokens) == (("b", "a", "c"), 0)


def test_a_forward_is_shared_where_the_order_allows_it():
    stored = ["bc", "bad", "cba", "dab", "dac"]  # each begins with the chunk, its antecedents follow
    rows = Library(set("abc"), {(row[0], tuple(row[1:]), "exact"): "exact" for row in stored})
    view = View(standing((), ()), rows, POLICIES["patched"], limits())
    made = placing(tuple(new("abcd")), view)
    assert (run_of(made.cost), made.after.chunk_ids) == cheapest(view, "abcd")
    assert made.cost.forwards == 1


@pytest.mark.slow
def test_of_40320_orders_the_one_that_is_placed_runs_least():
    patches = {}
    for order in ("cadbehgf", "hgfeabcd", "abdcfegh", "gahbfced"):
        patches |= {(order[n], tuple(order[:n]), "exact"): "exact" for n in range(1, 8) if n != 3}
    view = View(standing((), ()), Library(set("chg"), patches), POLICIES["patched"], limits())
    made = placing(tuple(new(NAMES)), view)
    assert (run_of(made.cost), made.after.chunk_ids) == cheapest(view, NAMES)
    assert made.cost.tokens > 0 and len(NAMES) == EXACT_UP_TO


def chains(names: Sequence[str], *orders: Sequence[str]) -> Library:
    return Library(
        {*names},
        {(o[n], tuple(o[:n]), "exact"): "exact" for o in orders for n in range(1, len(o))},
    )


def test_more_chunks_than_are_walked_exactly_find_the_one_stored_order(monkeypatch):
    names = [f"n{i}" for i in range(3 * EXACT_UP_TO)]
    monkeypatch.setattr(f"{__name__}.LENGTHS", {name: 7 for name in names})
    wanted = [*names[20:], *names[:20]]
    dead_ends = [[*names[i:], *names[:i]][:3] for i in range(len(names)) if i != 20]
    assert len(dead_ends) > BEAM
    view = View(standing((), ()), chains(names, wanted, *dead_ends), POLICIES["patched"], limits())
    made = placing(tuple(new(names)), view)
    assert made.after.chunk_ids == tuple(wanted)
    assert made.cost.tokens == 0
    without = replace(view, rows=chains(names, *dead_ends))
    given_ = plan(Arrange(tuple(new(names))), without)
    assert given_.after.chunk_ids == tuple(names)
    assert run_of(placing(tuple(new(names)), without).cost) <= run_of(given_.cost)


@pytest.mark.parametrize("policy", ["orbit", "blind", "patched"])
def test_an_assembly_of_many_is_never_dearer_than_the_order_given(policy, monkeypatch):
    names = [f"n{i}" for i in range(12)]
    monkeypatch.setattr(f"{__name__}.LENGTHS", {name: 3 + i % 4 for i, name in enumerate(names)})
    rows = chains(names[:6], names, names[::-1][:7])
    rows.patches |= {("n3", tuple(sorted(names[4:9])), "orbit"): "exact"}
    view = View(standing((), ()), rows, POLICIES[policy], limits())
    free, fixed = placing(tuple(new(names)), view), plan(Arrange(tuple(new(names))), view)
    assert run_of(free.cost) <= run_of(fixed.cost)
    assert sorted(free.after.chunk_ids) == sorted(names)


# -- which of them -----------------------------------------------------------------------------------


def test_those_given_first_stand_each_if_it_still_fits():
    items = new("hagb")  # 25, 4, 22 and 7 tokens
    assert fitting(items, limits(max_tokens=ANCHOR + 40)) == [0, 1, 3]
    assert fitting(items, limits(max_tokens=ANCHOR + 40), ANCHOR + 28) == [0]
    assert fitting(items, limits()) == [0, 1, 2, 3]
    with pytest.raises(WindowFull, match="none of 4 chunks fits"):
        fitting(items, limits(), ANCHOR + 3)


def test_chunks_that_stand_in_their_order_stay_as_they_are():
    view = View(standing("ab", ["exact"] * 2), Library(), POLICIES["patched"], limits())
    made = placing(requested(view, "cba"), view)
    assert made.after.chunk_ids == ("a", "b", "c")
    assert [seat.number for seat in made.after.seats[:2]] == [seat.number for seat in view.seats.seats]
    assert made.cost.tokens == LENGTHS["c"]
