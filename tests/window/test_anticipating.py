"""What an append needs when the oldest must leave is prepared before it comes, off its path."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.patches import later_of
from kamera.window import Append, Arrange, anticipate, former_of, respond
from tests.engines.compare import relative
from tests.models import samples
from tests.window.rig import FULL_RANK, QUESTION, SYSTEM, Prefilled, Snapshot, make, rig, watching

EXACT = ReusePolicy.exact()
DEFAULT = ReusePolicy(rank=FULL_RANK)
FAMILIES = ["qwen2_5_vl", "gemma3", "deepseek_v3", "llama_mqa"]


def texts(backbone, count: int, length: int = 12) -> list[Chunk]:
    """Texts of one length."""
    return [
        backbone.chunk_from_tensors(samples.text_ids(length, seed=i), label=f"t{i}") for i in range(count)
    ]


def full(backbone, chunks: list[Chunk], policy=EXACT, **options: Any) -> KameraWindow:
    """A window with room for just these chunks."""
    room = len(SYSTEM) + sum(chunk.num_tokens for chunk in chunks)
    return make(backbone, None, *chunks, policy=policy, max_tokens=room, **options)


def prepared(window: KameraWindow) -> KameraWindow:
    anticipate(window)
    window.flush()
    return window


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [EXACT, DEFAULT], ids=["exact", "default"])
def test_an_append_that_slides_is_one_forward_of_its_own_tokens(family, policy):
    backbone, _ = rig(family)
    chunks = texts(backbone, 8)
    plain, window = (full(backbone, chunks[:3], policy) for _ in range(2))
    for i, chunk in enumerate(chunks[3:]):
        without = plain.append(chunk)
        with watching(backbone) as seen:
            report = prepared(window).append(chunk)
        assert seen.spans == [chunk.num_tokens]
        assert (report.forwards, report.tokens_recomputed) == (1, chunk.num_tokens)
        assert without.tokens_recomputed == 3 * chunk.num_tokens
        held = chunks[i + 1 : i + 4]
        assert [slot.chunk_id for slot in window] == [c.id for c in held]
        assert [slot.chunk_id for slot in report.evicted] == [chunks[i].id]
        assert {slot.guarantee for slot in window} == {"exact"}
        assert relative(window.next_token_logits(QUESTION), Prefilled(backbone, held).logits) <= 1e-4
    assert window.slots[0].position == plain.slots[0].position


def test_pictures_that_leave_two_at_a_time():
    backbone, chunks = rig("qwen2_5_vl", 7)
    pictures, small = chunks[:6], texts(backbone, 2, 3)
    window = full(backbone, [*small, *pictures[:2]])
    with watching(backbone) as seen:
        report = prepared(window).append(pictures[2])
    assert seen.spans == [pictures[2].num_tokens]
    assert [slot.chunk_id for slot in report.evicted][:2] == [chunk.id for chunk in small]
    held = [*small, *pictures[:3]][len(report.evicted) :]
    assert relative(window.next_token_logits(QUESTION), Prefilled(backbone, held).logits) <= 1e-4


@pytest.mark.parametrize("operation", ["size", "slide", "evict", "plan", "respond"])
def test_a_wrong_guess_changes_nothing(operation):
    backbone, _ = rig("llama_mqa")
    chunks = texts(backbone, 4)
    large = backbone.chunk_from_tensors(samples.text_ids(20, seed=9), label="large")
    plain, window = (full(backbone, chunks[:3]) for _ in range(2))
    prepared(window)
    before = Snapshot.of(window)

    def done(one: KameraWindow) -> tuple[list[int], Any]:
        with watching(backbone) as seen:
            match operation:
                case "size":
                    report = one.append(large)
                case "slide":
                    one.slide()
                    report = one.append(chunks[3])
                case "evict":
                    one.evict(1)
                    report = one.append(chunks[3])
                case "plan":
                    report = one.run(one.plan(Append(chunks[3])))
                case _:
                    _, report = respond(
                        one, QUESTION, Arrange([*one.slots[1:], chunks[3]]), max_new_tokens=1, do_sample=False
                    )
        return seen.spans, report

    assert before.matches(window)
    with_it, without = done(window), done(plain)
    # the canonical of the chunk that would lead was stored: another way of leaving may find it there
    assert sum(without[0]) - chunks[0].num_tokens <= sum(with_it[0]) <= sum(without[0])
    assert len(with_it[0]) == len(without[0])
    assert [s.chunk_id for s in with_it[1].evicted] == [s.chunk_id for s in without[1].evicted]
    after, wanted = Snapshot.of(window), Snapshot.of(plain)
    assert torch.equal(after.ids, wanted.ids) and torch.equal(after.positions, wanted.positions)
    assert relative(after.logits, wanted.logits) <= 1e-5
    assert [slot.guarantee for slot in after.slots] == [slot.guarantee for slot in wanted.slots]


def test_a_smaller_chunk_than_foreseen_lets_no_more_leave_than_it_needs():
    backbone, _ = rig("llama_mqa")
    chunks = texts(backbone, 3)
    large = backbone.chunk_from_tensors(samples.text_ids(20, seed=9), label="large")
    window = prepared(full(backbone, [*chunks[:2], large]))
    assert [slot.chunk_id for slot in window.append(chunks[2]).evicted] == [chunks[0].id]
    held = [chunks[1], large, chunks[2]]
    assert relative(window.next_token_logits(QUESTION), Prefilled(backbone, held).logits) <= 1e-4


def test_what_was_prepared_in_a_context_that_is_withheld_since_serves_nothing():
    backbone, _ = rig("llama_mqa")
    chunks = texts(backbone, 4)
    window = prepared(full(backbone, chunks[:3]))
    former_of(window).store.withheld.add(former_of(window).context, "the test withholds it")
    again = len(SYSTEM) + 3 * chunks[0].num_tokens  # the window as it stood, apart from the store
    assert window.append(chunks[3]).tokens_recomputed == again + 3 * chunks[3].num_tokens
    assert relative(window.next_token_logits(QUESTION), Prefilled(backbone, chunks[1:]).logits) <= 1e-4


def test_nothing_is_prepared_where_nothing_leaves_or_leaving_runs_nothing():
    backbone, _ = rig("llama_mqa")
    chunks = texts(backbone, 4)
    lax = ReusePolicy(minimum="survivor", rank=FULL_RANK)
    windows = [
        make(backbone, None, *chunks[:3]),
        full(backbone, chunks[:3], lax, on_leave="keep"),
        make(backbone, None, max_tokens=100),
    ]
    for window in windows:
        with watching(backbone, later=True) as seen:
            prepared(window)
        assert (seen.forwards, later_of(backbone).held_bytes) == (0, 0)


def test_the_account_bears_it_as_later_work_and_a_window_that_is_gone_holds_nothing():
    backbone, _ = rig("llama_mqa")
    chunks = texts(backbone, 4)
    with watching(backbone, later=True) as seen:
        window = full(backbone, chunks[:3], ReusePolicy(audit=0.0))
        prepared(window)
        later = window.usage().background.tokens
        assert later >= 2 * chunks[0].num_tokens
        assert later_of(backbone).held_bytes > 0
        window.append(chunks[3])
        window.flush()
    usage = window.usage()
    assert usage.now.forwards + usage.background.forwards == seen.forwards
    assert usage.now.tokens + usage.background.tokens == seen.tokens
    prepared(window)
    assert later_of(backbone).held_bytes > 0
    del window
    gc.collect()
    assert later_of(backbone).held_bytes == 0


def test_what_is_prepared_keeps_alive_no_window_that_is_gone():
    """Nothing comes behind it: the queue itself looks for what nobody wants only when it is used."""
    backbone, _ = rig("llama_mqa")
    window = full(backbone, texts(backbone, 3), ReusePolicy(audit=0.0))
    prepared(window)
    assert later_of(backbone).held_bytes > 0
    gone = [
        weakref.ref(one) for one in (window._state, window._stage, former_of(window), former_of(window).store)
    ]
    del window
    gc.collect()
    assert [one() for one in gone] == [None] * 4


def test_a_fork_has_its_own_and_a_recall_is_served_too():
    backbone, _ = rig("llama_mqa")
    chunks = texts(backbone, 4)
    store = ChunkStore.open("memory://")
    make(backbone, store, chunks[3], policy=EXACT).evict(0)
    room = len(SYSTEM) + sum(chunk.num_tokens for chunk in chunks[:3])
    window = make(backbone, store, *chunks[:3], policy=EXACT, max_tokens=room)
    prepared(window)
    branch = window.fork()
    assert branch.append(chunks[3]).tokens_recomputed > chunks[3].num_tokens
    assert window.recall(chunks[3].id).tokens_recomputed == chunks[3].num_tokens
    assert torch.allclose(window.next_token_logits(QUESTION), branch.next_token_logits(QUESTION), atol=1e-4)
