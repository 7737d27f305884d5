"""Insert, replace and arrange against a re-prefill of the window they make."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ReusePolicy
from kamera.errors import InvalidPermutation, UnknownSlot, WindowFull
from kamera.window import Arrange, former_of
from tests.engines.compare import relative
from tests.window.rig import QUESTION, Prefilled, make, rig

EXACT = ReusePolicy(minimum="exact", on_miss="prefill")
FAMILIES = ["qwen2_5_vl", "kimi_k25", "gemma3"]


CLOSE = 1e-4


def apart(window, chunks) -> float:
    """How far a window that holds ``chunks`` is from a re-prefill of them."""
    assert [s.chunk_id for s in window.slots] == [c.id for c in chunks]
    return relative(window.next_token_logits(QUESTION), Prefilled(former_of(window).backbone, chunks).logits)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [EXACT, None], ids=["exact", "full rank"])
def test_insert_and_replace_equal_a_reprefill(family, policy):
    backbone, (a, b, c, d) = rig(family)
    window = make(backbone, None, a, b, policy=policy)
    window.insert(1, c)
    assert apart(window, [a, c, b]) <= CLOSE
    window.replace(0, d)
    assert apart(window, [d, c, b]) <= CLOSE
    window.insert(3, a)
    assert apart(window, [d, c, b, a]) <= CLOSE


@settings(max_examples=7)
@given(st.data())
def test_any_arrangement_equals_a_reprefill(data):
    backbone, chunks = rig("qwen2_5_vl", 5)
    window = make(backbone, None, *chunks[:3], policy=EXACT)
    held = list(chunks[:3])
    for _ in range(3):
        order = data.draw(st.permutations(range(5)))[: data.draw(st.integers(1, 5))]
        slots = {s.chunk_id: s for s in window.slots}
        report = window.run(Arrange([slots.get(chunks[i].id, chunks[i]) for i in order]))
        held = [chunks[i] for i in order]
        assert apart(window, held) <= CLOSE
        assert report.vision_encodes == 0 or any(c.id not in slots for c in held)
    assert {s.guarantee for s in window.slots} == {"exact"}


@pytest.mark.parametrize("wrong", ["twice", "stranger", "index", "rule", "room"])
def test_a_wrong_arrangement_changes_nothing(wrong):
    backbone, (a, b, c, d) = rig("qwen2_5_vl")
    window = make(backbone, None, a, b, max_tokens=40)
    other = make(backbone, None, c).slots[0]
    before, slots = window.next_token_logits(QUESTION), window.slots
    calls = {
        "twice": (InvalidPermutation, lambda: window.run(Arrange([slots[0], slots[0]]))),
        "stranger": (UnknownSlot, lambda: window.run(Arrange([slots[0], other]))),
        "index": (ValueError, lambda: window.insert(7, d)),
        "rule": (ValueError, lambda: window.insert(0, d, on_leave="maybe")),
        "room": (
            WindowFull,
            lambda: window.run(Arrange([*slots, c, d, backbone.chunk_from_tensors(range(3, 30))])),
        ),
    }
    error, call = calls[wrong]
    with pytest.raises(error):
        call()
    assert window.slots == slots
    assert relative(window.next_token_logits(QUESTION), before) == 0.0
