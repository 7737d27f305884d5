"""Composed patches on the shipped backbone answer orders nobody formed as a re-prefill does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.ops import budget, kv_bytes
from kamera.testbed import World

COMPOSED = ReusePolicy(minimum="composed", withheld=frozenset({"orbit"}), composed_up_to=3, forms="always")
ORDER = [2, 0, 1, 3]


def drawn(agree: bool):
    """Three legends and the items that they bind: their last word counts, or all say the same."""
    episode = World(11).episode(0, layout="LLLI")
    if not agree:
        return episode
    said = {fact.glyph: fact.colour for frame in episode.frames[:3] for fact in frame.facts}
    legends = [
        replace(frame, facts=tuple(replace(fact, colour=said[fact.glyph]) for fact in frame.facts))
        for frame in episode.frames[:3]
    ]
    return replace(episode, frames=(*legends, episode.frames[3]))


def window_of(backbone: Backbone, episode, order, policy: ReusePolicy, store=None) -> KameraWindow:
    store = store or ChunkStore.open("memory://")
    window = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
    for i in order:
        window.append(episode.frames[i].content)
    return window


@pytest.mark.parametrize("agree", [True, False], ids=["frames agree", "the last one counts"])
def test_what_a_re_prefill_answers_a_composed_order_does(agree):
    backbone, episode = Backbone(*testbed.load()), drawn(agree)
    window = window_of(backbone, episode, range(4), COMPOSED)
    window.form_pairs(3)
    window.reorder(ORDER)
    assert window.slots[3].guarantee == "composed"
    fresh = window_of(backbone, episode, ORDER, ReusePolicy.exact())
    blind = window.fork()
    blind.condition(3, False)
    found = [episode.ask(*subject, ORDER) for subject in episode.subjects(["value"])]
    asked = [question for question in found if question.bound]
    texts = [question.text for question in asked]
    wanted, ours, bare = (w.next_token_logits_of(texts).log_softmax(-1) for w in (fresh, window, blind))

    def lost(said: torch.Tensor) -> float:
        return float((wanted.exp() * (wanted - said)).sum(-1).mean())

    assert len(asked) >= 6 and lost(bare) > 1.0
    assert lost(ours) < (0.01 if agree else 0.05) * lost(bare)
    assert (ours.argmax(-1) == wanted.argmax(-1)).all()


def test_a_composed_patch_keeps_to_the_bytes_of_the_policy(monkeypatch):
    monkeypatch.setattr(budget, "SMALL", 0)
    backbone, episode = Backbone(*testbed.load()), drawn(False)
    window = window_of(backbone, episode, range(4), COMPOSED)
    window.form_pairs(3)
    window.reorder(ORDER)
    allowed = 0.03 * kv_bytes(window._state.residents[3].copy.kv)
    assert 0.6 * allowed < window._state.residents[3].copy.patch.nbytes <= allowed
