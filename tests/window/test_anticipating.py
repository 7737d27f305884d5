"""What an append needs when the oldest must leave is prepared before it comes, off its path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kamera import Chunk, KameraWindow, ReusePolicy
from kamera.window import Append, Arrange, anticipate, respond
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
