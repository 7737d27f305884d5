"""What a user of the default gets: edits that run nothing, the best KV at hand, and numbers that say how far
it is off."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import NotKept, StoreError
from kamera.ops import kv_copy, relocate_kv
from kamera.window import former_of
from tests.engines.compare import relative
from tests.window.rig import (
    QUESTION,
    SYSTEM,
    Prefilled,
    borne,
    chunks_of,
    distance,
    guarantees,
    is_a_reprefill,
    live,
    pictures,
    rig,
    watching,
)

FAMILIES = ("qwen2_5_vl", "llava", "kimi_k25")
WHOLE = ReusePolicy(rank=64, patch_bytes=None)
"""The default, with patches that leave nothing out."""


def opened(backbone, policy: ReusePolicy | None = None, **options) -> KameraWindow:
    return KameraWindow(backbone, ChunkStore.open("memory://"), SYSTEM, policy=policy, **options)


def walk(window: KameraWindow, chunks, keep: int, way: str) -> int:
    """Append each chunk, and let the oldest leave so that ``keep`` stay; the tokens of departures."""
    ran = 0
    for chunk in chunks:
        if way == "slide first" and len(window) == keep:
            ran += window.slide().tokens_recomputed
        window.append(chunk)
        if way == "append first" and len(window) > keep:
            ran += window.slide().tokens_recomputed
        window.flush()
    return ran


@pytest.mark.parametrize("way", ["slide first", "append first", "max_tokens"])
def test_twelve_pictures_of_which_four_stay_run_their_own_tokens_before_the_answers(way):
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 12)
    room = len(SYSTEM) + sum(chunk.num_tokens for chunk in chunks[:4])
    with watching(backbone, later=True) as seen:
        window = opened(backbone, max_tokens=room if way == "max_tokens" else None)
        ran = walk(window, chunks, 4, way)
        window.flush()
    usage, new = window.usage(), sum(chunk.num_tokens for chunk in chunks)
    assert ran == 0 and usage.now.tokens == new + len(SYSTEM) and borne(seen, usage)
    # a prefix cache runs all that stays at each departure, and the new chunk
    cached = new + sum(c.num_tokens for i in range(4, 12) for c in chunks[i - 3 : i])
    assert usage.background.tokens <= cached


@pytest.mark.parametrize("family", FAMILIES)
def test_three_of_a_sliding_window_are_what_the_plain_model_computes(family):
    """One from its canonical, one with its predecessor's patch, one prefilled behind them."""
    backbone, _ = rig(family)
    chunks = pictures(backbone, family, 7)
    window = opened(backbone, WHOLE)
    walk(window, chunks, 3, "slide first")
    assert guarantees(window) == ["exact", "patched", "patched"]
    assert is_a_reprefill(window, chunks) and chunks_of(window, chunks) == chunks[-3:]
    assert window[1].error == pytest.approx(0.0, abs=1e-6) and window[1].known == 1.0


def test_a_departure_is_served_without_a_forward_and_says_what_has_left():
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 5)
    window = opened(backbone)
    for chunk in chunks:
        window.append(chunk)
    window.flush()
    before = Prefilled(backbone, chunks)
    with watching(backbone) as seen:
        report = window.slide(2)
    assert (seen.forwards, report.forwards, report.tokens_recomputed) == (0, 0, 0)
    assert guarantees(window) == ["exact", "survivor", "survivor"]
    assert distance(window, 0, Prefilled(backbone, chunks[2:])) < 1e-5
    lengths = [chunk.num_tokens for chunk in chunks]
    for i, slot in enumerate(window):
        gone = 0.0 if i == 0 else sum(lengths[:2]) / sum(lengths[: 2 + i])
        assert slot.departed == pytest.approx(gone) and slot.known == 1.0
    # a survivor's KV is that of its prefill, turned as a whole
    layout = former_of(window).backbone.layout
    for i in (1, 2):
        by = [-sum(lengths[:2])] if backbone.axes == 1 else None
        true, now = before.kv(2 + i), live(window, i)
        shift = (
            by or [int(window[i].position - len(SYSTEM) - _start(backbone, chunks, 2 + i))] * backbone.axes
        )
        assert relative(_flat(relocate_kv(kv_copy(true), layout, shift)), _flat(now)) < 1e-5


def _start(backbone, chunks, index: int) -> int:
    window = opened(backbone, ReusePolicy.exact())
    for chunk in chunks[: index + 1]:
        window.append(chunk)
    return window[index].position - len(SYSTEM)


def _flat(kv) -> torch.Tensor:
    return torch.cat([tensor.flatten() for layer in kv for tensor in layer.values()])


def test_what_has_lost_most_is_served_with_the_patch_of_its_predecessor():
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 9)
    window = opened(backbone, WHOLE)
    walk(window, chunks[:8], 6, "slide first")
    window.slide(3)
    near = window[2]
    assert guarantees(window)[:2] == ["exact", "patched"] and near.guarantee == "near"
    assert near.antecedents == (window[1].chunk_id,) and 0.0 < near.known < 1.0
    # its KV is that behind its predecessor alone
    alone = opened(backbone, ReusePolicy.exact())
    for slot in window[1:3]:
        alone.append(next(chunk for chunk in chunks if chunk.id == slot.chunk_id))
    by = [window[2].position - alone[1].position] * backbone.axes
    layout = former_of(window).backbone.layout
    assert relative(_flat(relocate_kv(kv_copy(live(alone, 1)), layout, by)), _flat(live(window, 2))) < 1e-5
    kept = opened(backbone, ReusePolicy(max_departed=1.0))
    walk(kept, chunks[:8], 6, "slide first")
    kept.slide(3)
    assert guarantees(kept) == ["exact", "survivor", "survivor"]
    assert kept.usage().background.tokens < window.usage().background.tokens


def test_background_work_of_a_window_that_only_grows_is_what_a_prefix_cache_runs():
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 6)
    window = opened(backbone)
    walk(window, chunks, 10, "slide first")
    usage = window.usage()
    assert usage.background.tokens <= usage.now.tokens and usage.background.forwards <= usage.now.forwards


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_order_of_prepared_chunks_runs_nothing(count):
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", count)
    window = opened(backbone, WHOLE)
    for chunk in chunks:
        window.append(chunk)
    window.flush()
    with watching(backbone) as seen:
        report = window.prepare_orders()
    # each canonical was made after its append; the first picture of each order is that
    assert seen.forwards == report.forwards == {2: 2, 3: 12, 4: 48}[count]
    before = [live(window, i) for i in range(count)]
    assert window.prepare_orders().forwards == 0 and len(before) == count
    for order in itertools.permutations(range(count)):
        branch = window.fork()
        with watching(backbone) as seen:
            branch.reorder(order)
        assert seen.forwards == 0
        behind = ["exact", "patched", *(["orbit"] * count)][:count]
        expected = [
            "exact" if list(order[: i + 1]) == list(range(i + 1)) else g for i, g in enumerate(behind)
        ]
        assert guarantees(branch) == expected
        assert distance(branch, 1, Prefilled(backbone, chunks_of(branch, chunks))) < 1e-5


def test_an_orbit_patch_is_the_mean_over_orders_and_says_how_they_differ():
    backbone, _ = rig("llava")
    chunks = pictures(backbone, "llava", 3)
    window = opened(backbone, WHOLE)
    for chunk in chunks:
        window.append(chunk)
    window.prepare_orders()
    window.reorder([1, 0, 2])
    target, layout = chunks[2], backbone.layout
    assert window[2].guarantee == "orbit"
    truths = [Prefilled(backbone, [*order, target]).kv(2) for order in itertools.permutations(chunks[:2])]
    mean = sum(_flat(kv) for kv in truths) / 2
    assert relative(mean, _flat(live(window, 2))) < 1e-5
    alone = opened(backbone)
    alone.append(target)
    by = [window[2].position - alone[0].position]
    canonical = relocate_kv(kv_copy(live(alone, 0)), layout, by)
    worst = 0.0
    for index, layer in enumerate(canonical):
        for name, base in layer.items():
            deltas = [kv[index][name] - base for kv in truths]
            energy = sum(float(d.double().square().sum()) for d in deltas)
            middle = sum(deltas) / 2
            spread = sum(float((d - middle).double().square().sum()) for d in deltas)
            worst = max(worst, spread / energy if energy > 1e-9 else 0.0)
    assert window[2].error == pytest.approx(worst, rel=0.05)


def test_a_bound_on_the_error_makes_patches_grow_and_refuses_stored_ones():
    backbone, _ = rig("llava")
    chunks, store = pictures(backbone, "llava", 2), ChunkStore.open("memory://")

    def turned(max_error: float | None) -> KameraWindow:
        policy = ReusePolicy(rank=1, patch_bytes=None, max_error=max_error)
        window = KameraWindow(backbone, store, SYSTEM, policy=policy)
        for chunk in chunks:
            window.append(chunk)
        window.flush()
        window.prepare_orders()
        window.reorder([1, 0])
        return window

    loose = turned(None)
    assert loose[1].rank == 1 and loose[1].error > 0.05
    strict = turned(loose[1].error / 4)
    assert strict[1].guarantee == "patched" and strict[1].rank > 1
    assert strict[1].error <= loose[1].error / 4
    plain = Prefilled(backbone, chunks[::-1])
    assert distance(strict, 1, plain) < distance(loose, 1, plain)
    # the larger one serves where less is asked
    again = turned(None)
    assert again[1].guarantee == "patched" and again.usage().now.forwards <= loose.usage().now.forwards


def test_an_exact_window_with_a_limit_prepares_every_departure():
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 10)
    window = opened(backbone, ReusePolicy.exact(), max_tokens=len(SYSTEM) + 4 * chunks[0].num_tokens)
    ran = []
    for chunk in chunks:
        ran.append(window.append(chunk).tokens_recomputed)
        window.flush()
    n = chunks[0].num_tokens
    assert ran == [n] * 4 + [4 * n] + [n] * 5  # the first departure alone was not foreseen
    assert window.usage().background.tokens <= 6 * 3 * n  # what a prefix cache runs for six departures
    assert is_a_reprefill(window, chunks)


def test_an_exact_window_prepares_its_next_departure_within_what_a_prefix_cache_runs():
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 9)
    window = opened(backbone, ReusePolicy.exact())
    walk(window, chunks[:6], 4, "slide first")
    first = window.usage()
    for chunk in chunks[6:]:
        assert window.slide().tokens_recomputed == 0
        window.append(chunk)
        window.flush()
    usage = window.usage()
    assert is_a_reprefill(window, chunks) and set(guarantees(window)) == {"exact"}
    assert usage.now.tokens - first.now.tokens == sum(chunk.num_tokens for chunk in chunks[6:])
    # a guess costs what the one departure was worth: chunks that come and go again prepare nothing more
    wrong = opened(backbone, ReusePolicy.exact())
    for chunk in chunks[:3]:
        wrong.append(chunk)
    wrong.slide()
    wrong.flush()
    before = wrong.usage().background.tokens
    for chunk in chunks[3:]:
        wrong.append(chunk)
        wrong.flush()
        wrong.evict(len(wrong) - 1)
    archived = sum(chunk.num_tokens for chunk in chunks[3:])  # the canonical of each that left
    assert 0 < wrong.usage().background.tokens - before - archived <= 2 * chunks[0].num_tokens


def test_a_store_that_takes_nothing_costs_no_more_in_the_background(monkeypatch):
    backbone, _ = rig("qwen2_5_vl")
    chunks = pictures(backbone, "qwen2_5_vl", 10)
    sound, failing = opened(backbone), opened(backbone)

    def refuse(records):
        raise StoreError("no room, says the test")

    monkeypatch.setattr(former_of(failing).store, "put_many", refuse)
    with pytest.warns(NotKept):
        walk(failing, chunks, 4, "slide first")
    walk(sound, chunks, 4, "slide first")
    assert failing.usage().now.tokens == sound.usage().now.tokens
    assert failing.usage().background.tokens <= sound.usage().background.tokens
    assert is_a_reprefill(failing, chunks) is False  # survivors all of it: nothing was at hand


def test_prepare_orders_takes_neighbours_alone():
    backbone, _ = rig("llava")
    window = opened(backbone)
    for chunk in pictures(backbone, "llava", 3):
        window.append(chunk)
    for slots in ([0], [0, 2]):
        with pytest.raises(ValueError, match="neighbours"):
            window.prepare_orders(slots)
    assert window.next_token_logits(QUESTION).isfinite().all()
