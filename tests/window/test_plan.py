"""Plans are decided from rows alone: no backbone, no store, no tensor stands behind these tests."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kamera import window
from kamera.engines import PositionLimits
from kamera.errors import NotRelocatable, PolicyRefused, WindowFull
from kamera.ops import PatchBudget, SampleSize
from kamera.patches import Losses
from kamera.trust import Proof, ReusePolicy
from kamera.window.plan import plan
from kamera.window.requests import Append, Arrange, Condition, Evict, Newcomer, Recall, Reorder, Slide
from kamera.window.seats import Seat, Seats, Source, Spot
from kamera.window.steps import (
    Archive,
    Clean,
    Cost,
    Harvest,
    Limits,
    Place,
    Prefill,
    Sample,
    View,
    cost_of,
    runs_of,
)

LENGTH, ANCHOR = 10, 4
POLICY = ReusePolicy(certified=False, forms="always")


@dataclass
class Fake:
    """A catalogue of names: what it has is what it was given."""

    canonicals: set[str] = field(default_factory=set)
    patches: dict[tuple, str] = field(default_factory=dict)
    asked: list[tuple] = field(default_factory=list)
    bases: dict[str, object] = field(default_factory=dict)
    based: dict[tuple, object] = field(default_factory=dict)
    doubts: set[tuple] = field(default_factory=set)
    losses: Losses = field(default_factory=Losses)

    def has_canonical(self, chunk_id: str) -> bool:
        return chunk_id in self.canonicals

    def base(self, chunk_id):
        return self.bases.get(chunk_id)

    def patch(self, chunk_id, antecedents, kind, base=""):
        return self.patch_within(chunk_id, LENGTH, antecedents, kind, None, base)

    def patch_within(self, chunk_id, length, antecedents, kind, budget, base=""):
        self.asked.append((chunk_id, tuple(antecedents), kind))
        if base:
            return self.based.get((chunk_id, tuple(antecedents), base))
        formed = self.patches.get((chunk_id, tuple(antecedents), kind))
        return None if formed is None else Row(tuple(antecedents), kind, formed)

    def near(self, chunk_id, antecedents, limit):
        rows = [Row(a, kind, formed) for (c, a, kind), formed in self.patches.items() if c == chunk_id]
        return [(0.25, row) for row in rows]

    def has_refused(self, chunk_id, antecedents, kind, base="") -> bool:
        return False

    def doubted(self, chunk_id, antecedents) -> bool:
        return (chunk_id, tuple(antecedents)) in self.doubts


PROVED = Proof(0.0, 0, 1, 0.0, ())


@dataclass(frozen=True)
class Row:
    antecedents: tuple[str, ...]
    kind: str
    formed: str
    rank: int = 8
    proof: Proof | None = PROVED
    created: float = 0.0
    budget: PatchBudget = field(default_factory=lambda: PatchBudget(64))
    sample: SampleSize | None = None


class Line:
    """Chunks one after another, each of `LENGTH` positions."""

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]:
        starts = (ANCHOR + i * LENGTH for i in range(len(chunk_ids)))
        return [Spot((start,), (start + LENGTH - 1,)) for start in starts]

    def form(self, chunk_id: str) -> None:
        """Each runs alone."""


NO_LIMIT = PositionLimits()


def limits(max_tokens: int | None = None, reach: PositionLimits = NO_LIMIT) -> Limits:
    return Limits(ANCHOR, reach, max_tokens, False, Line())


def standing(*names: str, **changed: Seat) -> Seats:
    """A window of exact chunks that were prefilled one after another."""
    seats = []
    for i, (name, spot) in enumerate(zip(names, Line().compact(names), strict=True)):
        source = Source(spot, names[:i], "exact", canonical=not i)
        seats.append(Seat(name, LENGTH, spot, source, "exact"))
    return Seats.home(seats, 1)


def everything(*names: str) -> Fake:
    return Fake(canonicals=set(names))


def new(name: str, encodes: int = 0) -> Newcomer:
    return Newcomer(name, LENGTH, encodes)


def decided(request, state: Seats, rows: Fake, policy: ReusePolicy, bounds: Limits):
    return plan(request, View(state, rows, policy, bounds))


def kinds(made) -> list[str]:
    return [type(step).__name__ for step in made.steps]


def worths(made) -> list[str]:
    return list(made.after.worths)


# -- append and recall -----------------------------------------------------------------------------


def test_an_append_of_a_new_chunk_is_two_forwards_and_a_patch():
    made = decided(Append(new("c", 1), "now"), standing("a", "b"), everything("a", "b"), POLICY, limits())
    assert kinds(made) == ["Prefill", "Archive", "Harvest"]
    assert made.cost == Cost(forwards=2, tokens=2 * LENGTH, encodes=1)
    assert (worths(made), made.after.seats[-1].archived) == (["exact"] * 3, True)


def test_an_append_that_archives_later_is_one_forward():
    made = decided(Append(new("b"), "later"), standing("a"), everything("a"), POLICY, limits())
    assert (kinds(made), made.cost.forwards) == (["Prefill"], 1)
    assert not made.after.seats[-1].archived
    gone = decided(Evict(1), made.after, everything("a"), POLICY, limits())
    assert (kinds(gone), gone.cost.forwards) == (["Archive", "Harvest"], 1)


def test_the_first_chunk_is_its_canonical():
    made = decided(Append(new("a"), "now"), standing(), Fake(), POLICY, limits())
    (step,) = [s for s in made.steps if isinstance(s, Place)]
    assert (step.seat.source.patch, step.tokens, made.cost.forwards) == (None, step.seat.length, 1)
    assert worths(made) == ["exact"]


def test_a_recall_with_a_stored_patch_costs_nothing():
    rows = everything("a", "b")
    rows.patches["b", ("a",), "exact"] = "exact"
    made = decided(Recall(new("b"), False), standing("a"), rows, POLICY, limits())
    assert (kinds(made), made.cost, worths(made)) == (["Place"], Cost(), ["exact", "patched"])


BASE = SimpleNamespace(context=SimpleNamespace(anchor="other"), behind=ANCHOR + 3)


def test_a_chunk_with_a_base_takes_one_forward_and_a_patch():
    rows = everything("a")
    rows.bases["b"] = BASE
    for before, name in ((standing("a"), "b"), (standing(), "b")):
        made = decided(Append(new(name, 0), "now"), before, rows, POLICY, limits())
        assert kinds(made) == ["Prefill", "Harvest"] and made.cost == Cost(1, LENGTH)
        assert [s.base for s in made.steps if isinstance(s, Harvest)] == ["other"]
        assert set(worths(made)) == {"exact"}


def test_a_base_with_its_patch_costs_nothing_and_stands_elsewhere():
    rows = everything()
    rows.bases["b"] = BASE
    rows.based["b", (), "other"] = Row((), "exact", "exact")
    made = decided(Append(new("b"), "now"), standing(), rows, POLICY, limits())
    (step,) = [s for s in made.steps if isinstance(s, Place)]
    assert (step.seat.source.patch.base, step.tokens) == ("other", 0)
    assert (made.cost, worths(made)) == (Cost(), ["patched"])
    assert step.seat.source.home == Line().compact(["b"])[0].shift((3,))
    gone = decided(Evict(0), made.after, rows, POLICY, limits())
    assert (kinds(gone), gone.cost) == ([], Cost())


@pytest.mark.parametrize("changed", [{"minimum": "exact"}, {"minimum": "blind"}, {"on_miss": "blind"}])
def test_a_base_is_no_canonical_to_show_blind_or_exact(changed):
    rows = everything("a")
    rows.bases["b"] = BASE
    made = decided(Append(new("b"), "now"), standing("a"), rows, replace(POLICY, **changed), limits())
    assert worths(made)[-1] == "exact" and kinds(made)[0] == "Prefill"
    assert ("Archive" in kinds(made)) == (changed == {"minimum": "exact"})


def test_a_recall_without_one_forms_it():
    made = decided(Recall(new("b"), False), standing("a"), everything("a", "b"), POLICY, limits())
    assert kinds(made) == ["Prefill", "Harvest"]
    assert (made.cost.forwards, worths(made)) == (1, ["exact", "exact"])


def test_a_patch_of_weaker_antecedents_does_not_do():
    rows = everything("a", "b")
    rows.patches["b", ("a",), "exact"] = "near"
    made = decided(Recall(new("b"), False), standing("a"), rows, POLICY, limits())
    assert made.cost.forwards == 1


@pytest.mark.parametrize("minimum, kind, worth", [("orbit", "orbit", "orbit"), ("near", "exact", "near")])
def test_weaker_patches_serve_where_the_policy_says(minimum, kind, worth):
    rows = everything("a", "b")
    rows.patches["b", ("a",) if kind == "orbit" else ("z",), kind] = "exact"
    policy = replace(POLICY, minimum=minimum, max_divergence=1.0 if minimum == "near" else None)
    made = decided(Recall(new("b"), False), standing("a"), rows, policy, limits())
    assert (made.cost.forwards, worths(made)[1]) == (0, worth)
    strict = decided(Recall(new("b"), False), standing("a"), rows, POLICY, limits())
    assert strict.cost.forwards == 1


class Sampled(Fake):
    """Its patches are completed from a few tokens."""

    def patch_within(self, *asked):
        row = super().patch_within(*asked)
        return row and replace(row, sample=SampleSize(2, 0.1))


def test_a_sampled_patch_of_other_antecedents_is_near_and_no_sample():
    rows = Sampled(canonicals={"a", "b"}, patches={("b", ("z",), "sampled"): "exact"})
    policy = replace(POLICY, minimum="near", max_divergence=1.0)
    made = decided(Recall(new("b"), False), standing("a"), rows, policy, limits())
    source = made.after.seats[1].source
    assert (source.guarantee, source.patch.kind, source.sample) == ("near", "sampled", None)


def test_a_blind_miss_runs_nothing():
    policy = replace(POLICY, on_miss="blind")
    made = decided(Recall(new("b"), False), standing("a"), everything("a", "b"), policy, limits())
    assert (made.cost.forwards, worths(made)) == (0, ["exact", "blind"])


# -- leaving and rearranging -----------------------------------------------------------------------


def test_a_slide_costs_nothing_and_turns_nothing():
    made = decided(Slide(1), standing("a", "b", "c"), everything("a", "b", "c"), POLICY, limits())
    assert (kinds(made), made.cost, worths(made)) == ([], Cost(), ["survivor", "survivor"])
    assert made.after.frame == (LENGTH,)
    assert [s.spot for s in made.after.seats] == [s.spot for s in made.before.seats[1:]]


def test_under_exact_what_stays_is_prefilled_again():
    policy = replace(POLICY, minimum="exact")
    made = decided(Slide(1), standing("a", "b", "c"), everything("a", "b", "c"), policy, limits())
    assert worths(made) == ["exact", "exact"]
    assert made.cost.forwards == 1  # the first leads now: its canonical is stored


def test_a_reorder_leaves_an_unchanged_front_and_uses_patches():
    rows = everything("a", "b", "c")
    rows.patches["c", ("a",), "exact"] = "exact"
    made = decided(Reorder([0, 2, 1]), standing("a", "b", "c"), rows, POLICY, limits())
    assert [type(s).__name__ for s in made.steps] == ["Place", "Prefill", "Harvest"]
    assert (made.cost.forwards, worths(made)) == (1, ["exact", "patched", "patched"])
    assert [s.number for s in made.after.seats] == [made.before.seats[i].number for i in (0, 2, 1)]


def test_a_patch_that_a_plan_forms_serves_later_in_it():
    """The same chunk twice behind the same antecedents: the second finds what the first will have formed."""
    state = standing("a", "b", "c")
    late = replace(state.seats[2], archived=False)
    made = decided(
        Reorder([0, 1, 2]), replace(state, seats=(*state.seats[:2], late)), Fake(), POLICY, limits()
    )
    assert made.cost == Cost()  # nothing changes, so nothing is archived
    moved = decided(
        Reorder([1, 0, 2]), replace(state, seats=(*state.seats[:2], late)), Fake(), POLICY, limits()
    )
    archive = next(s for s in moved.steps if isinstance(s, Archive) and s.number == late.number)
    assert archive.tokens and any(isinstance(s, Harvest) and s.number == late.number for s in moved.steps)


def test_an_arrangement_keeps_repairs_or_prefills():
    rows = everything("a", "b", "c")
    for on_leave, forwards, last in (("keep", 0, "survivor"), ("repair", 1, "exact"), ("exact", 1, "exact")):
        state = standing("a", "b", "c")
        made = decided(Arrange((0, 2), on_leave), state, rows, POLICY, limits())
        assert (made.cost.forwards, worths(made)[-1]) == (forwards, last), on_leave
        assert made.left == (state.seats[1].number,)


def test_a_chunk_is_shown_clean_and_conditioned_again():
    rows = everything("a", "b")
    clean = decided(Condition(1, False), standing("a", "b"), rows, POLICY, limits())
    assert ([type(s) for s in clean.steps][:1], clean.cost.forwards) == ([Clean], 0)
    assert worths(clean) == ["exact", "blind"]
    again = decided(Condition(1, True), clean.after, rows, POLICY, limits())
    assert (worths(again), kinds(again)) == (["exact", "exact"], [])


# -- refusals --------------------------------------------------------------------------------------


def test_a_full_window_slides_and_refuses_too_large_chunks():
    small = limits(max_tokens=ANCHOR + 2 * LENGTH)
    made = decided(Append(new("c"), "now"), standing("a", "b"), everything("a", "b"), POLICY, small)
    assert made.after.chunk_ids == ("b", "c") and len(made.left) == 1
    with pytest.raises(WindowFull, match="room for 9"):
        decided(Append(new("c"), "now"), standing(), Fake(), POLICY, limits(max_tokens=ANCHOR + 9))


def test_what_no_forward_makes_exact_is_refused():
    policy = replace(POLICY, minimum="exact")
    blind = decided(Condition(1, False), standing("a", "b"), everything("a", "b"), POLICY, limits()).after
    with pytest.raises(PolicyRefused, match="holds blind KV"):
        decided(Append(new("c"), "now"), blind, everything("a", "b"), policy, limits())


def test_a_chunk_that_changes_shape_does_not_move():
    state = standing("a", "b")
    odd = replace(state.seats[1].source, home=replace(state.seats[1].spot, shape="bent"))
    seats = (state.seats[0], replace(state.seats[1], source=odd, spot=odd.home))
    with pytest.raises(NotRelocatable, match="does not move as a whole"):
        decided(Slide(1), Seats.home(seats, 1), everything("a", "b"), POLICY, limits())


def test_a_position_past_the_limit_is_refused_at_planning():
    reach = PositionLimits(below=20, reason="too far")
    with pytest.raises(NotRelocatable, match="too far"):
        decided(Append(new("b"), "now"), standing("a"), everything("a"), POLICY, limits(reach=reach))


def test_a_plan_changes_nothing_it_was_given():
    state = standing("a", "b", "c")
    made = decided(Reorder([2, 1, 0]), state, everything("a", "b", "c"), POLICY, limits())
    assert made.before is state and state == standing_as(state)
    assert [type(s) for s in made.steps if isinstance(s, Prefill)]


def standing_as(state: Seats) -> Seats:
    return Seats(tuple(replace(seat) for seat in state.seats), state.frame)


def test_later_work_that_waits_already_is_not_counted_again():
    state, policy = standing("a", "b"), replace(POLICY, forms="returning")
    row = replace(state, seats=tuple(replace(seat, archived=False) for seat in state.seats))
    alone, waiting = limits(), replace(limits(), pending=frozenset("a"))
    costs = [decided(Slide(2), row, Fake(), policy, bound).later for bound in (alone, waiting)]
    assert costs == [Cost(2, 2 * LENGTH), Cost(1, LENGTH)]


def test_steps_that_share_a_forward_are_one_group_with_what_is_placed_between():
    row = standing("a", "b", "c", "d")
    a, b, c, d = row.seats
    first, archive, place = Prefill(a, standing()), Archive(b.number), Place(b)
    sample = Sample(c, row, SampleSize(3, 0.5), c.source, own=True, joined=True)
    clean, last = Clean(d.number), Prefill(d, row)
    steps = [first, archive, place, sample, clean, last]
    assert runs_of(steps) == [[first, place, sample], [archive], [clean], [last]]
    assert cost_of(steps) == Cost(2, LENGTH + 3 + LENGTH)
    assert cost_of([replace(place, tokens=4), replace(last, joined=True)], 1) == Cost(1, 4 + LENGTH, 1)


def test_the_planner_names_neither_torch_nor_a_backbone():
    """Its own code, that is: what it imports of the store knows tensors."""
    for name in ("plan", "placer", "seating", "seats", "steps"):
        tree = ast.parse((Path(window.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [alias.name for alias in node.names]
                named.append(getattr(node, "module", "") or "")
                assert not any(n.startswith(("torch", "kamera.engines.hf")) for n in named), (name, named)


@pytest.mark.parametrize(("stored", "harvests"), [("exact", 0), ("patched", 1), ("orbit", 1)])
def test_a_patch_formed_behind_stronger_kv_is_not_formed_again_whatever_its_rank(stored, harvests):
    rows = everything("a", "b", "c")
    rows.patch_within = lambda *given: None  # smaller than the budget
    rows.patch = lambda *given: Row(("a", "b"), "exact", stored, budget=PatchBudget(1))
    first, second = standing("a", "b").seats
    before = replace(standing("a", "b"), seats=(first, second.relabel("patched")))
    made = decided(Append(new("c"), "now"), before, rows, POLICY, limits())
    assert kinds(made).count("Harvest") == harvests
    assert worths(made) == ["exact", "patched", "patched"]
