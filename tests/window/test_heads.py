"""A chunk that begins as one in the window does is prefilled from where they differ, and is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import Chunk, ChunkStore, ReusePolicy
from kamera.window import Arrange, former_of
from tests.engines.compare import relative
from tests.models import samples
from tests.window.rig import FULL_RANK, QUESTION, Prefilled, make, rig

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


@pytest.mark.parametrize("policy", [EXACT, FORM], ids=["exact", "form"])
def test_a_head_by_itself_needs_no_forward(policy):
    backbone, (a, *_) = rig("llama_mqa")
    window = make(backbone, None, a, text(backbone, WHOLE), policy=policy)
    new = edited(backbone, more=0)
    assert window.replace(1, new).forwards == 0
    assert window.slots[1].guarantee == "exact"
    assert off(window, [a, new]) <= 1e-4


def test_the_canonical_of_a_head_is_cut_out_of_the_stored_one():
    backbone, _ = rig("llama_mqa")
    store = ChunkStore.open("memory://")
    window = make(backbone, store, text(backbone, WHOLE), policy=FORM)
    new = edited(backbone, more=0)
    assert window.replace(0, new).forwards == 0
    cut = store.get_canonical(former_of(window).context, new.id)
    whole = store.get_canonical(former_of(window).context, text(backbone, WHOLE).id)
    pairs = zip(cut.kv, whole.kv, strict=True)
    assert all(torch.equal(a[n], b[n][:, :25]) for a, b in pairs for n in a)
    assert off(window, [new]) <= 1e-4
    apart = make(backbone, ChunkStore.open("memory://"), new, policy=FORM)
    theirs = former_of(apart).store.get_canonical(former_of(apart).context, new.id).kv
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for a, b in zip(cut.kv, theirs, strict=True) for n in a)


def test_behind_another_context_nothing_of_it_is_taken():
    backbone, (a, b, *_) = rig("llama_mqa")
    window = make(backbone, None, a, text(backbone, WHOLE), policy=EXACT)
    new = edited(backbone)
    for order in ([b, new], [a, b, new]):
        branch = window.fork()
        held = {slot.chunk_id: slot for slot in branch.slots}
        report = branch.run(Arrange([held.get(chunk.id, chunk) for chunk in order]))
        assert report.tokens_recomputed >= b.num_tokens + new.num_tokens
        assert off(branch, order) <= 1e-4


def test_patched_kv_is_not_taken_and_a_short_head_at_its_own_place_alone():
    backbone, (a, b, *_) = rig("llama_mqa")
    whole, store = text(backbone, WHOLE), ChunkStore.open("memory://")
    make(backbone, store, a, b, whole, policy=FORM)
    window = make(backbone, store, a, b, whole, policy=FORM)
    assert window.slots[2].guarantee == "patched"
    new = edited(backbone)
    assert window.plan(replacing(window, 2, new)).heads == {}
    window.replace(2, new)
    assert off(window, [a, b, new]) <= 1e-4
    exact = make(backbone, None, a, whole, policy=EXACT)
    assert list(exact.plan(replacing(exact, 1, edited(backbone, head=8))).heads.values()) == [8]
    short = edited(backbone, head=7)
    assert list(exact.plan(replacing(exact, 1, short)).heads.values()) == [7], (
        "at the place of what it replaces"
    )
    assert exact.plan(Arrange([exact[0], b, short])).heads == {}


def test_after_a_slide_a_head_stands_where_it_was_computed():
    backbone, (a, b, *_) = rig("llama_mqa")
    window = make(backbone, None, a, b, text(backbone, WHOLE), policy=FORM)
    window.slide()  # the text is a survivor, and still knows a
    new = edited(backbone)
    assert window.plan(replacing(window, 1, new)).heads == {}
    window.replace(1, new, on_leave="exact")
    assert off(window, [b, new]) <= 1e-4


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
