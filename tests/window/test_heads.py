"""A chunk that begins as one in the window does is prefilled from where they differ, and is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import Chunk, ReusePolicy
from kamera.window import Arrange, former_of
from tests.engines.compare import relative
from tests.models import samples, tiny
from tests.window.rig import FULL_RANK, QUESTION, Prefilled, make, rig, watching

EXACT = ReusePolicy.exact()
FORM = ReusePolicy(rank=FULL_RANK, patch_bytes=None, forms="always")
FAMILIES = ["qwen2_5_vl", "gemma3", "deepseek_v3", "llama_mqa"]
WHOLE = samples.text_ids(40, seed=5)


def text(backbone, *spans: torch.Tensor) -> Chunk:
    return backbone.chunk_from_tensors(torch.cat(spans), label="text")


def edited(backbone, head: int = 25, more: int = 7) -> Chunk:
    """The first tokens of `WHOLE`, and others."""
    return text(backbone, WHOLE[:head], samples.text_ids(more, seed=91) if more else WHOLE[:0])


def replacing(window, index: int, content) -> Arrange:
    return Arrange([*window.slots[:index], content, *window.slots[index + 1 :]])


def off(window, chunks) -> float:
    return relative(window.next_token_logits(QUESTION), Prefilled(former_of(window).backbone, chunks).logits)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [EXACT, FORM], ids=["exact", "form"])
def test_an_edited_text_is_prefilled_from_its_first_change(family, policy):
    backbone, (a, b, *_) = rig(family)
    window = make(backbone, None, a, text(backbone, WHOLE), policy=policy)
    new = edited(backbone)
    planned = window.plan(replacing(window, 1, new))
    report = window.replace(1, new)
    assert (report.forwards, report.tokens_recomputed) == (planned.cost.forwards, planned.cost.tokens)
    assert report.tokens_recomputed == 7 * (1 if policy is EXACT else 2)  # in context, and for the store
    assert window.slots[1].guarantee == "exact"
    assert off(window, [a, new]) <= 1e-4
    window.append(b)  # behind KV that was put together
    assert off(window, [a, new, b]) <= 1e-4


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_edits_of_texts_equal_a_reprefill(data):
    """Texts of a few tokens that grow, shrink and change at any place, so that heads are met by chance."""
    backbone, _ = rig("llama_mqa")
    window = make(backbone, None, policy=data.draw(st.sampled_from([EXACT, FORM])))
    pool = [samples.text_ids(24, seed=seed) for seed in (1, 2)]

    def some() -> Chunk:
        head = pool[data.draw(st.integers(0, 1))][: data.draw(st.integers(6, 24))]
        more = samples.text_ids(data.draw(st.integers(1, 6)), seed=data.draw(st.integers(10, 12)))
        return text(backbone, head, more) if data.draw(st.booleans()) else text(backbone, head)

    chunks: list[Chunk] = []
    for _ in range(4):
        at = data.draw(st.integers(0, len(chunks)))
        chunks = [*chunks[:at], some(), *chunks[at + data.draw(st.integers(0, 1)) :]]
        held = {}
        for slot in reversed(window.slots):
            held[slot.chunk_id] = slot
        order = [held.pop(c.id, c) for c in chunks]
        planned = window.plan(Arrange(order))
        report = window.run(Arrange(order))
        assert report.tokens_recomputed == planned.cost.tokens
        assert off(window, chunks) <= 1e-4


@pytest.mark.few(3)
@pytest.mark.parametrize("moves", [False, True], ids=["another", "moved"])
@pytest.mark.parametrize("family", tiny.of_each_kind(samples.PICTURED))
def test_words_in_front_of_a_picture_do_not_run_again_for_another_one_in_its_place(family, moves):
    backbone, words = tiny.backbone(family), torch.tensor([20, 21])

    def chunk(seed: int, wide: bool) -> Chunk:
        ids, inputs = samples.sample(family, seed, wide=wide)
        return samples.chunk(backbone, samples.Sample(torch.cat((words, ids[2:])), inputs))

    first, other, tail = chunk(0, False), chunk(1, True), chunk(2, False)
    shown = [first, other, tail] if moves else [first, tail]
    window = make(backbone, None, *shown, policy=ReusePolicy.exact())
    with watching(backbone) as seen:
        order = [window.slots[1], first, window.slots[2]] if moves else [other, window.slots[1]]
        window.run(window.plan(Arrange(order, "exact", archive=False)))
    chunks = [other, first, tail] if moves else [other, tail]
    tokens = sum(one.num_tokens for one in chunks)
    assert seen.tokens == tokens - (3 if backbone.facts.joins else 0)
    assert off(window, chunks) <= 1e-4
