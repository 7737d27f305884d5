"""Any sequence of operations, held against the plain model over the concatenated sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.content import Chunk
from kamera.ops import relocate_kv, uniform_offset
from kamera.window import former_of, sequence_of
from tests.engines.compare import relative, worst
from tests.models import samples
from tests.window.rig import (
    GREEDY,
    QUESTION,
    Prefilled,
    Snapshot,
    chunks_of,
    distance,
    guarantees,
    live,
    make,
    rig,
    rope_index,
    watching,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "kimi_k25", "gemma3", "llava", "deepseek_v32")
ROUNDING = 1e-4

QUICK = tuple(p for p in Phase if p != Phase.explain)  # explaining a failure takes minutes

# An operation is a name and two numbers; what they mean depends on the window they meet.
number = st.integers(0, 11)


def sequences(*names: str, least: int = 4, most: int = 8) -> st.SearchStrategy:
    return st.lists(st.tuples(st.sampled_from(names), number, number), min_size=least, max_size=most)


def apply(window: KameraWindow, chunks: list[Chunk], operation: tuple[str, int, int]):
    """Run one operation, and hold its report against the test's own hooks."""
    name, a, b = operation
    chunk = chunks[a % len(chunks)]
    count = len(window)
    run: Callable | None = None
    if name == "append" or count == 0:
        name, run = "append", lambda: window.append(chunk)
    elif name == "later":
        name, run = "append", lambda: window.append(chunk, archive="later")
    elif name == "recall":
        if former_of(window).store.contexts_of(chunk.id):
            run = lambda: window.recall(chunk.id, move=bool(b % 2))  # noqa: E731
    elif name == "slide":
        run = lambda: window.slide(1 + a % count)  # noqa: E731
    elif name == "evict":
        run = lambda: window.evict(a % count)  # noqa: E731
    elif name == "reorder":
        order = list(range(count))
        order.insert(b % count, order.pop(a % count))
        run = lambda: window.reorder(order)  # noqa: E731
    elif name == "condition":
        run = lambda: window.condition(a % count, bool(b % 2))  # noqa: E731
    if run is None:
        return None
    stored = name != "append" or bool(former_of(window).store.contexts_of(chunk.id))
    with watching(former_of(window).backbone) as seen:
        report = run()
    assert report.operation == name
    assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (
        seen.forwards,
        seen.tokens,
        seen.encodes,
    )
    if stored:
        assert seen.encodes == 0, "the vision tower ran for a stored chunk"
    assert report.slots == window.slots
    return report


def assert_positions_are_the_models(window: KameraWindow, chunks: list[Chunk]) -> None:
    assert torch.equal(
        sequence_of(window).position_ids, rope_index(former_of(window).backbone, chunks_of(window, chunks))
    )
    assert (
        len(sequence_of(window).input_ids)
        == sequence_of(window).position_ids.shape[1]
        == sequence_of(window).input_ids.shape[0]
    )


def assert_exact_is_exact(window: KameraWindow, chunks: list[Chunk]) -> Prefilled:
    """Promise 5: every slot that says exact holds what a re-prefill computes there."""
    plain = Prefilled(former_of(window).backbone, chunks_of(window, chunks))
    for i, slot in enumerate(window.slots):
        if slot.guarantee == "exact":
            assert distance(window, i, plain) <= ROUNDING, (i, guarantees(window))
    return plain


def assert_answers_as_reprefilled(window: KameraWindow, chunks: list[Chunk], plain: Prefilled) -> None:
    assert relative(window.next_token_logits(QUESTION), plain.logits) <= ROUNDING
    got = window.generate(QUESTION, max_new_tokens=3, **GREEDY)
    assert torch.equal(got, plain.generate(max_new_tokens=3, **GREEDY)[0])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("on_miss", "family"),
    [*(("form", family) for family in FAMILIES), ("prefill", "qwen2_5_vl"), ("prefill", "kimi_k25")],
)
@settings(max_examples=3, phases=QUICK)
@given(operations=sequences("append", "later", "recall", "slide", "evict", "reorder"))
def test_an_exact_window_equals_a_reprefill_after_any_operation(family, on_miss, operations):
    backbone, chunks = rig(family)
    window = make(backbone, policy=ReusePolicy(minimum="exact", on_miss=on_miss))
    for operation in operations:
        apply(window, chunks, operation)
        assert set(guarantees(window)) <= {"exact"}
        assert_positions_are_the_models(window, chunks)
        plain = assert_exact_is_exact(window, chunks)
        assert relative(window.next_token_logits(QUESTION), plain.logits) <= ROUNDING
    assert_answers_as_reprefilled(window, chunks, plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, phases=QUICK)
@given(operations=sequences("append", "append", "recall", "reorder", "reorder", "slide", "condition"))
def test_exact_and_fully_patched_slots_answer_as_a_reprefill(family, operations):
    """Patches of full rank formed behind exact antecedents lose nothing.

    ``fresh`` says that no survivor or clean view was ever in the window while a chunk arrived, so no
    patch in the store was formed behind one.
    """
    backbone, chunks = rig(family)
    window = make(backbone)
    fresh = True
    for operation in operations:
        apply(window, chunks, operation)
        assert_positions_are_the_models(window, chunks)
        plain = assert_exact_is_exact(window, chunks)
        now = set(guarantees(window))
        fresh = fresh and now <= {"exact", "patched"} and all(s.conditioned for s in window.slots)
        if fresh:
            assert relative(window.next_token_logits(QUESTION), plain.logits) <= ROUNDING
    if fresh:
        assert_answers_as_reprefilled(window, chunks, plain)


EVERYTHING = ("append", "append", "later", "recall", "slide", "evict", "reorder", "condition", "condition")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("minimum", "family"),
    [
        *(("patched", family) for family in ("qwen2_5_vl", "kimi_k25", "llava")),
        *(("orbit", family) for family in ("qwen2_5_vl", "kimi_k25")),
        *(("blind", family) for family in ("kimi_k25", "llava")),
    ],
)
@settings(max_examples=4, phases=QUICK)
@given(operations=sequences(*EVERYTHING, least=5, most=9))
def test_labels_are_honest_after_any_operations(family, minimum, operations):
    """Low ranks, clean views: exact is exact, survivors and blind slots are what they say."""
    backbone, chunks = rig(family)
    window = make(backbone, policy=ReusePolicy(minimum=minimum, rank=2, forms="always"))
    alone = {c.id: Prefilled(backbone, [c]).kv(0) for c in chunks}
    home = {c.id: rope_index(backbone, [c])[:, 4:] for c in chunks}
    for operation in operations:
        before = {s.number: (s, live(window, i), place(window, i)) for i, s in enumerate(window.slots)}
        report = apply(window, chunks, operation)
        if report is None:
            continue
        assert all(torch.equal(place(window, i), p) for i, p in enumerate(compact(window, chunks)))
        assert_exact_is_exact(window, chunks)
        for i, slot in enumerate(window.slots):
            if slot.guarantee == "blind" and slot.rank == 0:  # others were prefilled behind blind KV
                step = uniform_offset(home[slot.chunk_id], place(window, i))
                want = relocate_kv(alone[slot.chunk_id], backbone.layout, step)
                assert worst(live(window, i), want) <= ROUNDING
            was = before.get(slot.number)
            stayed = report.operation in ("slide", "evict", "append", "recall") and was is not None
            if slot.guarantee == "survivor" and stayed and was[0].conditioned == slot.conditioned:
                step = uniform_offset(was[2], place(window, i))
                assert worst(live(window, i), relocate_kv(was[1], backbone.layout, step)) <= ROUNDING


def place(window: KameraWindow, index: int) -> torch.Tensor:
    slot = window.slots[index]
    return sequence_of(window).position_ids[:, slot.start : slot.start + slot.length]


def compact(window: KameraWindow, chunks: list[Chunk]) -> list[torch.Tensor]:
    whole = rope_index(former_of(window).backbone, chunks_of(window, chunks))
    return [whole[:, s.start : s.start + s.length] for s in window.slots]


@settings(max_examples=6, phases=QUICK)
@given(
    ours=sequences("append", "recall", "slide", "evict", "reorder", "condition", least=2, most=4),
    theirs=sequences("append", "recall", "slide", "evict", "reorder", "condition", least=2, most=4),
)
def test_forks_go_their_own_ways(ours, theirs):
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks[:3])
    branch = window.fork()
    start = Snapshot.of(window)
    assert start.matches(branch)
    for operation in theirs:
        apply(branch, chunks, operation)
    assert start.matches(window)
    ends = Snapshot.of(branch)
    for operation in ours:
        apply(window, chunks, operation)
    assert ends.matches(branch)


def test_videos_on_the_clock_stand_where_the_model_puts_them():
    """Qwen2.5-VL counts seconds: clips of different speed, moved by slide and reorder."""
    backbone, _ = rig("qwen2_5_vl")
    clips = [
        samples.chunk(backbone, samples.video_sample("qwen2_5_vl", seed, seconds=seconds))
        for seed, seconds in ((1, 0.5), (2, 1.5), (3, 1.0))
    ]
    window = make(backbone, None, *clips, policy=ReusePolicy(minimum="exact"))
    window.reorder([2, 0, 1])
    assert_positions_are_the_models(window, clips)
    window.slide()
    assert_positions_are_the_models(window, clips)
    plain = assert_exact_is_exact(window, clips)
    assert_answers_as_reprefilled(window, clips, plain)
    assert [s.position for s in window.slots] == [4, 4 + 3 + 1 + 2 + 4]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25", "llava"])
def test_a_blind_slot_equals_a_model_masked_from_other_chunks(family):
    # No anchor: a canonical stood right behind it, and with it in sight the mask would have to move it.
    backbone, chunks = rig(family)
    a, b = chunks[:2]
    store = ChunkStore.open("memory://")
    KameraWindow(backbone, store).append(b)  # only b is archived, alone
    window = KameraWindow(backbone, store, policy=ReusePolicy(minimum="blind", forms="always"))
    window.append(a)
    window.recall(b.id)
    assert guarantees(window) == ["exact", "blind"]
    ids, inputs = samples.join([a, b])
    total, body = ids.shape[1], b.num_tokens
    mask = torch.full((total, total), float("-inf")).triu(1)
    mask[total - body :, : total - body] = float("-inf")
    at = sequence_of(window).position_ids
    with torch.no_grad():
        out = backbone.model(
            input_ids=ids,
            attention_mask=mask[None, None],
            position_ids=at[:, None] if backbone.axes == 3 else at,
            use_cache=True,
            **inputs,
        )
    want = [
        {c.name: getattr(layer, c.tensor)[0][:, total - body :] for c in spec.channels}
        for layer, spec in zip(out.past_key_values.layers, backbone.layout, strict=True)
    ]
    assert worst(live(window, 1), want) <= 1e-5
    window.reorder([1, 0])  # and in front it is exact
    assert guarantees(window)[0] == "exact"


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_rank_patch_from_the_store_restores_the_reprefill(family):
    backbone, chunks = rig(family, count=3)
    store = former_of(make(backbone, None, *chunks)).store
    window = make(backbone, store, *chunks)
    assert guarantees(window) == ["exact", "patched", "patched"]
    plain = Prefilled(backbone, chunks)
    for i in range(3):
        assert distance(window, i, plain) <= ROUNDING
    assert_answers_as_reprefilled(window, chunks, plain)
