"""What was planned is what is measured: forwards, tokens, encodes, and the window afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import Spent
from kamera.errors import KameraError, PolicyRefused, UnknownChunk, WindowFull
from kamera.window import Append, Arrange, Condition, Evict, Recall, Reorder, Slide, requests
from tests.window.rig import FULL_RANK, SYSTEM, make, rig, watching

POLICIES = {
    "patched": ReusePolicy(rank=FULL_RANK, forms="always"),
    "prefill": ReusePolicy(on_miss="prefill", rank=4, forms="always"),
    "orbit": ReusePolicy(minimum="orbit", forms="always"),
    "near": ReusePolicy(minimum="near", max_divergence=0.7, on_miss="blind", forms="always"),
    "blind": ReusePolicy(minimum="blind", forms="always"),
    "exact": ReusePolicy(minimum="exact", on_miss="form"),
    "repaired": ReusePolicy(rank=FULL_RANK, on_leave="repair", on_miss="prefill"),
    "by default": ReusePolicy(),
}
ON_LEAVE = st.sampled_from(["keep", "repair", "exact"])
CHUNK = st.integers(0, 4)
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), CHUNK, st.sampled_from(["now", "later"])),
    st.tuples(st.just("recall"), CHUNK, st.booleans()),
    st.tuples(st.just("slide"), st.integers(1, 2)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("reorder"), st.randoms(use_true_random=False)),
    st.tuples(st.just("insert"), st.integers(0, 3), CHUNK, ON_LEAVE),
    st.tuples(st.just("replace"), st.integers(0, 3), CHUNK, ON_LEAVE),
    st.tuples(st.just("condition"), st.integers(0, 3), st.booleans()),
)


@functools.cache
def pieces():
    return rig("qwen2_5_vl", 5)


def asked(window: KameraWindow, chunks, operation: tuple) -> tuple[str, tuple, dict]:
    """An operation's name and arguments, for this window."""
    name, first, *rest = operation
    if name == "append":
        return name, (chunks[first],), {"archive": rest[0]}
    if name == "recall":
        return name, (chunks[first].id,), {"move": rest[0]}
    if name in ("slide", "evict"):
        return name, (first,), {}
    if name == "reorder":
        order = list(range(len(window)))
        first.shuffle(order)
        return name, (order,), {}
    if name == "condition":
        return name, (first, rest[0]), {}
    return name, (first, chunks[rest[0]]), {"on_leave": rest[1]}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(operations=st.lists(OPERATIONS, min_size=3, max_size=9), kv=st.sampled_from(["as-is", "int8"]))
def test_planned_equals_measured_over_any_sequence(name, operations, kv):
    backbone, chunks = pieces()
    with ChunkStore.open("memory://", kv=kv) as store:
        window = KameraWindow(backbone, store, SYSTEM, policy=POLICIES[name], max_tokens=50)
        for what, planned, measured in planned_and_run(window, chunks, operations):
            assert planned == measured, what


def requested(window: KameraWindow, verb: str, given_: tuple, options: dict):
    """What an operation asks for, as data."""
    if verb not in ("insert", "replace"):
        return getattr(requests, verb.title())(*given_, **options)
    index, content = given_
    if verb == "replace":
        window[index]  # raises IndexError for none
    elif index > len(window):
        raise ValueError("no place")
    return Arrange([*window.slots[:index], content, *window.slots[index + (verb == "replace") :]], **options)


def planned_and_run(window: KameraWindow, chunks, operations) -> Iterator[tuple[tuple, tuple, tuple]]:
    """Each operation, what its plan said of it, and what was: cost, chunks, guarantees, who left."""
    for operation in operations:
        verb, given_, options = asked(window, chunks, operation)
        window.flush()  # a plan tells of the store as it is, which background work still changes
        try:
            planned = window.plan(requested(window, verb, given_, options))
        except (KameraError, ValueError, IndexError):
            with pytest.raises((KameraError, ValueError, IndexError)):
                getattr(window, verb)(*given_, **options)
            continue
        slots = window.slots
        report = getattr(window, verb)(*given_, **options)
        measured = Spent(report.forwards, report.tokens_recomputed, report.vision_encodes)
        left = {s.number for s in slots} - {s.number for s in window.slots}
        stand = tuple(slot.chunk_id for slot in window.slots), tuple(slot.guarantee for slot in window.slots)
        foreseen = planned.cost, planned.after.chunk_ids, planned.after.guarantees, set(planned.left)
        yield (verb, given_, options), foreseen, (measured, *stand, left)


# -- a plan does nothing ---------------------------------------------------------------------------


def test_a_plan_runs_no_forward_and_no_tower(tmp_path):
    backbone, chunks = pieces()
    with ChunkStore.open(tmp_path / "s") as store:
        window = make(backbone, store, *chunks[:3])
        window.evict(2)
        window.recall(chunks[2].id)
        window.flush()
        slots, held = window.slots, store.ls()
        with watching(backbone) as seen:
            plans = [
                window.plan(Append(chunks[3])),
                window.plan(Recall(chunks[1].id)),
                window.plan(Slide()),
                window.plan(Evict(1)),
                window.plan(Reorder([2, 1, 0])),
                window.plan(Arrange([chunks[3], *window.slots])),
                window.plan(Arrange([chunks[3], *window.slots[1:]])),
                window.plan(Arrange([window[2], chunks[3]])),
                window.plan(Condition(1, False)),
            ]
        assert (seen.forwards, seen.encodes) == (0, 0)
        assert (window.slots, store.ls()) == (slots, held)
    assert [p.operation for p in plans[:3]] == ["append", "recall", "slide"]
    assert plans[2].cost == Spent()
    assert plans[0].cost == Spent(2, 2 * chunks[3].num_tokens, 1)


def test_a_plan_refuses_what_its_operation_would():
    backbone, chunks = pieces()
    window = make(backbone, None, *chunks[:2], max_tokens=4 + 12 + 12)
    with pytest.raises(UnknownChunk):
        window.plan(Recall("no such chunk"))
    with pytest.raises(ValueError, match="cannot slide 3"):
        window.plan(Slide(3))
    small = make(backbone, None, max_tokens=6)
    with pytest.raises(WindowFull), watching(backbone) as seen:
        small.append(chunks[0])
    assert seen.encodes == 0  # refused before it was encoded


def test_exact_only_behind_a_clean_view_is_refused_in_the_plan():
    backbone, chunks = pieces()
    window = make(backbone, None, *chunks[:2], policy=POLICIES["exact"])
    window.condition(1, False)
    with pytest.raises(PolicyRefused):
        window.plan(Append(chunks[2]))
