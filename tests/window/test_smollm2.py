"""Windows of sentences on a language model with real weights: they go on as a person would."""

from __future__ import annotations

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.certify import kl
from tests.engines.compare import relative
from tests.models.smollm2 import (
    CAT,
    CODE,
    FACTS,
    KEY,
    TRAIN,
    begun,
    goes_on,
    needs_smollm2,
    plain_of_window,
    smollm2,
)

pytestmark = needs_smollm2

ROUNDING = 1e-4


def opened(*facts: str, store: ChunkStore | None = None, policy: ReusePolicy | None = None) -> KameraWindow:
    """A window with sentences in it, whose background work is done."""
    store = store or ChunkStore.open("memory://")
    window = KameraWindow(smollm2(), store, system="You are helpful.", policy=policy)
    for fact in facts:
        window.append(fact)
    window.flush()
    return window


def off(window: KameraWindow, fact: str) -> float:
    """How far the logits behind the beginning of a fact are from the plain model's."""
    question = begun(fact)
    return relative(window.next_token_logits(question), plain_of_window(window, question))


def test_an_exact_window_slides_recalls_and_reorders_as_the_plain_model_would():
    window = opened(CODE, CAT, TRAIN, policy=ReusePolicy.exact())
    code = window.slots[0].chunk_id
    assert goes_on(window, CODE)
    window.slide()
    window.append(KEY)
    assert goes_on(window, KEY) and off(window, TRAIN) <= ROUNDING
    assert not goes_on(window, CODE), "it has left, and nothing of it stayed"
    window.recall(code)
    assert goes_on(window, CODE)
    window.reorder([3, 1, 0, 2])
    assert goes_on(window, CAT) and off(window, KEY) <= ROUNDING
    assert {slot.guarantee for slot in window.slots} == {"exact"}


def test_a_slide_of_the_default_runs_nothing_and_is_much_nearer_than_blind_reuse():
    window = opened(*FACTS)
    assert window.slide().tokens_recomputed == 0
    assert [slot.guarantee for slot in window.slots] == ["exact", "survivor", "survivor"]
    blind = window.fork()
    for slot in blind.slots:
        blind.condition(slot, False)
    questions = [begun(fact) for fact in (CAT, TRAIN, KEY)]
    plain = torch.stack([plain_of_window(window, question) for question in questions])
    own, theirs = (
        float(kl(torch.stack([one.next_token_logits(q) for q in questions]), plain).mean())
        for one in (window, blind)
    )
    assert 1e-5 < own < 0.6 * theirs, "measured .020 of .043 nats"
    assert goes_on(window, KEY)


def test_what_comes_back_under_the_default_runs_its_own_tokens_and_is_known():
    window = opened(CODE, CAT, TRAIN)
    slot = window.slots[0]
    window.slide()
    assert window.recall(slot.chunk_id).tokens_recomputed == slot.length
    assert [s.guarantee for s in window.slots] == ["exact", "survivor", "patched"] and goes_on(window, CODE)


def test_a_sentence_shown_alone_is_conditioned_again_as_it_was():
    window = opened(CAT, TRAIN)
    before = window.next_token_logits(begun(TRAIN))
    assert window.condition(1, False).forwards == 0 and window.slots[1].guarantee == "blind"
    assert relative(window.next_token_logits(begun(TRAIN)), before) > 1e-2 and goes_on(window, TRAIN)
    assert window.condition(1, True).forwards == 0 and window.slots[1].guarantee == "exact"
    assert relative(window.next_token_logits(begun(TRAIN)), before) <= ROUNDING


def test_a_store_opened_again_gives_a_new_window_what_an_old_one_read(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        chunk = opened(CODE, CAT, store=store).slots[0].chunk_id
    with ChunkStore.open(tmp_path) as store:
        window = opened(store=store)
        assert window.recall(chunk).tokens_recomputed == 0
        assert goes_on(window, CODE) and off(window, CODE) <= ROUNDING


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [None, ReusePolicy.exact()])
def test_a_saved_window_goes_on_where_it_stood(tmp_path, policy):
    window = opened(CODE, CAT, TRAIN, policy=policy)
    window.slide()
    window.save(tmp_path / "window")
    loaded = KameraWindow.load(tmp_path / "window", smollm2(), ChunkStore.open("memory://"))
    assert [s.guarantee for s in loaded.slots] == [s.guarantee for s in window.slots]
    question = begun(TRAIN)
    assert relative(loaded.next_token_logits(question), window.next_token_logits(question)) <= 1e-5
    loaded.append(KEY)
    assert goes_on(loaded, KEY)
