"""A model that was changed under a live window never has its old KV served as exact."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.engines.hf.witness import Witness
from kamera.errors import ComputationChanged, IncompatibleChunk
from kamera.patches import identity, later_of
from tests.engines import changes
from tests.engines.compare import relative
from tests.models import samples, tiny
from tests.window.rig import QUESTION, Prefilled, make

FAMILY = changes.FAMILY


def window_of(backbone: HfEngine, store: ChunkStore) -> KameraWindow:
    """A window of two pictures, which recalls what the store has of them."""
    window = make(backbone, store, policy=ReusePolicy.exact())
    for seed in (1, 2):
        window.append(samples.chunk(backbone, samples.sample(FAMILY, seed), f"p{seed}"))
    return window


def error(backbone: HfEngine, window: KameraWindow) -> float:
    """How far the window's logits are from a prefill by the model as it is now."""
    chunks = [samples.chunk(backbone, samples.sample(FAMILY, seed)) for seed in (1, 2)]
    with torch.no_grad():
        return relative(window.next_token_logits(QUESTION), Prefilled(backbone, chunks).logits)


@pytest.mark.parametrize("change", changes.SEEN_AT_ONCE, ids=lambda change: change.__name__)
def test_the_next_operation_refuses_a_changed_model(change, monkeypatch):
    model = tiny.build(FAMILY)
    act = change(model, monkeypatch)
    backbone, store = HfEngine(model), ChunkStore.open("memory://")
    window = window_of(backbone, store)
    before, slots = backbone.fingerprint, window.slots
    assert error(backbone, window) < 1e-4
    act()
    for use in (lambda: window.next_token_logits(QUESTION), lambda: window.slide(1)):
        with pytest.raises(IncompatibleChunk, match="have changed since this window was made"):
            use()
    assert window.slots == slots
    # a new window of the same backbone recalls nothing of the old model's
    assert backbone.fingerprint != before
    assert error(backbone, window_of(backbone, store)) < 1e-4


def test_an_operation_looks_at_the_model_once(monkeypatch):
    looks, look = [], Witness.look
    monkeypatch.setattr(Witness, "look", lambda self: looks.append(self) or look(self))
    backbone = HfEngine(tiny.build(FAMILY))
    window = window_of(backbone, ChunkStore.open("memory://"))
    window.flush()
    chunk = samples.chunk(backbone, samples.sample(FAMILY, 7), "p7")
    operations = {
        "append": lambda: window.append(chunk),
        "append text": lambda: window.append(backbone.chunk_from_tensors(torch.arange(5, 9))),
        "plan": lambda: window.plan_slide(),
        "reorder": lambda: window.reorder([1, 0, *range(2, len(window))]),
        "ask": lambda: window.next_token_logits(QUESTION),
        "slide": lambda: window.slide(1),
    }
    counted = {}
    for name, act in operations.items():
        looks.clear()
        act()
        counted[name] = len(looks)
        window.flush()
    assert counted == dict.fromkeys(operations, 1) | {"append text": 2}, "the caller's chunk is one"


@pytest.mark.parametrize("change", changes.UNSEEN, ids=lambda change: change.__name__)
@pytest.mark.parametrize("found", ["a new window", "many operations"])
def test_what_no_look_sees_the_probe_finds(change, found, monkeypatch):
    model = tiny.build(FAMILY)
    act = change(model, monkeypatch)
    backbone, store = HfEngine(model), ChunkStore.open("memory://")
    window, before = window_of(backbone, store), backbone.fingerprint
    window.flush()  # the model has been asked
    act()
    assert backbone.fingerprint == before
    if found == "a new window":
        make(backbone, store)
    else:
        monkeypatch.setattr(identity, "EVERY", 8)
        with suppress(IncompatibleChunk):  # by the last of them later work may have come to it
            for _ in range(8):
                window.next_token_logits(QUESTION)
    window.flush()  # it is asked again, as later work
    assert backbone.fingerprint != before
    with pytest.raises(IncompatibleChunk):
        window.slide(1)
    assert error(backbone, window_of(backbone, store)) < 1e-4


@pytest.mark.parametrize("found", ["a new window", "many operations"])
def test_a_kernel_that_computes_otherwise_is_refused_by_name(found, monkeypatch):
    model = tiny.build(FAMILY)
    act = changes.broken_kernel(monkeypatch, "silu")
    backbone, store = HfEngine(model), ChunkStore.open("memory://")
    window, before = window_of(backbone, store), backbone.fingerprint
    window.flush()
    act()
    if found == "a new window":
        make(backbone, store)
    else:
        monkeypatch.setattr(identity, "EVERY", 8)
        with suppress(ComputationChanged):
            for _ in range(8):
                window.next_token_logits(QUESTION)
    window.flush()
    for use in (lambda: window.next_token_logits(QUESTION), lambda: make(backbone, store)):
        with pytest.raises(ComputationChanged, match="answers the text probe otherwise than before"):
            use()
    assert backbone.fingerprint == before


_seen = 0


def _count(*_):
    global _seen
    _seen += 1


def test_a_hook_that_counts_and_is_no_observer_is_refused_by_name_in_later_work_too(caplog):
    backbone = HfEngine(tiny.build(FAMILY))
    backbone.model.model.language_model.layers[0].register_forward_hook(_count)
    with pytest.raises(ComputationChanged, match=r"changes with each forward.*as an Observer"):
        backbone.identity.answers()
    with pytest.raises(IncompatibleChunk, match="or its code, settings, hooks"):
        make(backbone, ChunkStore.open("memory://"), policy=ReusePolicy.exact())
    with suppress(ComputationChanged):
        later_of(backbone).flush()
    assert "changes with each forward" in caplog.text and "recursion" not in caplog.text
