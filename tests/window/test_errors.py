"""Refusals: named, with the offending value in the message, and nothing changed by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import (
    CorruptChunk,
    EmptyChunk,
    InvalidPermutation,
    ModelChanged,
    ProcessorRequired,
    UnknownChunk,
    UnknownSlot,
)
from kamera.window import former_of, keep_orbit
from tests.models import samples, tiny
from tests.window.rig import (
    QUESTION,
    Snapshot,
    breaking,
    inventory,
    make,
    rig,
)

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def window():
    backbone, chunks = rig(FAMILY)
    return make(backbone, None, *chunks, max_tokens=60)


def assert_refused(window, error, message, call):
    before, held = Snapshot.of(window), inventory(former_of(window).store)
    with pytest.raises(error, match=message) as caught:
        call()
    assert before.matches(window)
    assert inventory(former_of(window).store) == held
    return str(caught.value)


CALLS = {
    "unknown chunk": (UnknownChunk, "ab12", lambda w: w.recall("ab12")),
    "no permutation: twice": (
        InvalidPermutation,
        r"\[0, 0, 1, 2\].*4 slots",
        lambda w: w.reorder([0, 0, 1, 2]),
    ),
    "no permutation: short": (InvalidPermutation, r"\[1, 0\].*4 slots", lambda w: w.reorder([1, 0])),
    "no permutation: past": (InvalidPermutation, r"\[0, 1, 2, 4\]", lambda w: w.reorder([0, 1, 2, 4])),
    "slide of too many": (ValueError, "slide 5 .*window of 4", lambda w: w.slide(5)),
    "slide of none": (ValueError, "slide 0", lambda w: w.slide(0)),
    "slide of less": (ValueError, "slide -1", lambda w: w.slide(-1)),
    "slot past the end": (UnknownSlot, "slot 4 of a window of 4", lambda w: w.evict(4)),
    "slot before the start": (UnknownSlot, "slot -5", lambda w: w.condition(-5, False)),
    "no slot at all": (UnknownSlot, "'desk'", lambda w: w.evict("desk")),
    "True is no slot": (UnknownSlot, "True", lambda w: w.condition(True, False)),
    "empty question": (EmptyChunk, "no tokens", lambda w: w.next_token_logits([])),
    "empty question to generate": (EmptyChunk, "no tokens", lambda w: w.generate(torch.tensor([]))),
    "empty question to bear": (EmptyChunk, "no tokens", lambda w: w.is_load_bearing(0, [])),
    "text without a tokenizer": (ProcessorRequired, "Who", lambda w: w.generate("Who?")),
    "wrong archive": (ValueError, "'soon'.*now.*later", lambda w: w.append(None, archive="soon")),
    "orbit of a leading chunk": (ValueError, "leading", lambda w: keep_orbit(w, 0)),
    "orbit of no orderings": (ValueError, "samples 0", lambda w: keep_orbit(w, 2, samples=0)),
    "no content": (EmptyChunk, "''", lambda w: w.append("")),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_refused_by_name_and_changes_nothing(window, case):
    error, message, call = CALLS[case]
    assert_refused(window, error, message, lambda: call(window))


WRONG_POLICIES = {
    "minimum": ({"minimum": "best"}, "'best'.*exact"),
    "on_miss": ({"on_miss": "skip"}, "'skip'.*form"),
    "contradiction": ({"minimum": "exact", "on_miss": "blind"}, "contradict"),
    "rank": ({"rank": 0}, "rank 0"),
    "divergence below": ({"max_divergence": -0.1}, "-0.1"),
    "divergence above": ({"max_divergence": 1.5}, "1.5"),
}


@pytest.mark.parametrize("case", WRONG_POLICIES)
def test_a_wrong_policy_is_refused_when_it_is_made(case):
    options, message = WRONG_POLICIES[case]
    with pytest.raises(ValueError, match=message):
        ReusePolicy(**options)


@pytest.mark.few(2)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("archive", ["now", "later"])
def test_an_append_that_fails_after_sliding_changes_nothing(after, archive):
    backbone, chunks = rig(FAMILY)
    window = make(backbone, None, *chunks[:3], max_tokens=4 + 36)
    fresh = samples.chunk(backbone, samples.sample(FAMILY, 30))
    before, held = Snapshot.of(window), inventory(former_of(window).store)
    if after and archive == "later":
        after = 0
    with breaking(backbone, after), pytest.raises(RuntimeError, match="says the test"):
        window.append(backbone.chunk_from_tensors(samples.text_ids(9, 31)), archive=archive)
    assert before.matches(window)
    assert inventory(former_of(window).store) == held
    assert len(window.append(fresh).evicted) == 1  # and it goes on


@pytest.mark.few(3)
@pytest.mark.parametrize("operation", ["recall", "reorder", "exact slide", "keep an answer"])
def test_whatever_fails_in_the_model_leaves_the_window_as_it_was(operation):
    backbone, chunks = rig(FAMILY)
    policy = ReusePolicy(minimum="exact") if operation == "exact slide" else None
    store = former_of(make(backbone, None, chunks[3])).store
    window = make(backbone, store, *chunks[:3], policy=policy)
    before = Snapshot.of(window)
    calls = {
        "recall": (0, lambda: window.recall(chunks[3].id)),
        "reorder": (1, lambda: window.reorder([2, 1, 0])),
        "exact slide": (0, lambda: window.slide()),
        "keep an answer": (
            2,
            lambda: window.generate(QUESTION, keep=True, max_new_tokens=2, min_new_tokens=2),
        ),
    }
    after, call = calls[operation]
    with breaking(backbone, after), pytest.raises(RuntimeError, match="says the test"):
        call()
    assert before.matches(window)


# -- damage ----------------------------------------------------------------------------------------


def damage(store: ChunkStore, kind: str, chunk_id: str, behind: tuple[str, ...] | None = None) -> None:
    """Flip a byte in every object of a chunk, or in the one behind these antecedents."""
    root = Path(store.url)
    hit = 0
    for info in store.ls(kind):
        if info.chunk_id == chunk_id and behind in (None, tuple(info.antecedents)):
            path = root / "objects" / f"{info.key}.safetensors"
            data = bytearray(path.read_bytes())
            data[-20] ^= 0x10
            path.write_bytes(data)
            hit += 1
    assert hit


def test_a_damaged_canonical_is_never_recalled(tmp_path):
    backbone, chunks = rig(FAMILY)
    store = ChunkStore.open(tmp_path / "store")
    window = make(backbone, store, *chunks)
    window.evict(3)
    damage(store, "canonical", chunks[3].id)
    before = Snapshot.of(window)
    with pytest.raises(CorruptChunk, match=r"\.safetensors"):
        window.recall(chunks[3].id)
    assert before.matches(window)


# -- weights that change ---------------------------------------------------------------------------


def test_weights_changed_under_a_window_make_it_refuse():
    backbone = HfEngine(tiny.build(FAMILY))
    chunks = [samples.chunk(backbone, samples.sample(FAMILY, s)) for s in range(2)]
    window = make(backbone, None, *chunks)
    slots, held = window.slots, inventory(former_of(window).store)
    with torch.no_grad():
        backbone.model.lm_head.weight[0, 0] += 1
    calls = (
        lambda: window.append(chunks[0]),
        lambda: window.recall(chunks[0].id),
        lambda: window.slide(),
        lambda: window.evict(0),
        lambda: window.reorder([1, 0]),
        lambda: window.condition(1, False),
        lambda: keep_orbit(window, 1),
        lambda: window.next_token_logits(QUESTION),
        lambda: window.generate(QUESTION),
        lambda: window.is_load_bearing(0, QUESTION),
    )
    for call in calls:
        with pytest.raises(ModelChanged, match="have changed since its fingerprint was made"):
            call()
    assert window.slots == slots and inventory(former_of(window).store) == held
