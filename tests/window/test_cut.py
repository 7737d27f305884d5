"""A text cut into chunks keeps its KV, and so does what is behind it; parts stay or leave by themselves."""

from __future__ import annotations

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.window import Arrange, cut_text, former_of
from tests.engines.compare import relative
from tests.models import samples
from tests.window.rig import QUESTION, SYSTEM, Prefilled, rig, watching

EXACT = ReusePolicy.exact()
STREAMING = ReusePolicy(minimum="survivor", audit=0.0)
FAMILIES = ["qwen2_5_vl", "kimi_k25", "gemma3"]
IDS = samples.text_ids(12)


def window_of(family, policy=EXACT):
    own, (a, b, *_) = rig(family)
    text = own.chunk_from_tensors(IDS)
    window = KameraWindow(own, ChunkStore.open("memory://"), SYSTEM, policy=policy)
    for chunk in (a, text, b):
        window.append(chunk)
    return window, a, b


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_changes_no_bit_and_runs_nothing(family):
    window, a, b = window_of(family)
    want = window.next_token_logits(QUESTION)
    with watching(former_of(window).backbone, later=True) as seen:
        parts = cut_text(window, 1, [3, 8])
    assert seen.forwards == 0
    assert [slot.length for slot in parts] == [3, 5, 4]
    assert [slot.start - parts[0].start for slot in parts] == [0, 3, 8]
    chunks = [former_of(window).backbone.chunk_from_tensors(ids) for ids in IDS.split([3, 5, 4])]
    assert [slot.chunk_id for slot in window] == [a.id, *(chunk.id for chunk in chunks), b.id]
    assert {slot.guarantee for slot in window} == {"exact"}
    assert torch.equal(window.next_token_logits(QUESTION), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_behind_a_cut_is_exact_and_what_a_part_leaves_is_repaired(family):
    window, a, b = window_of(family)
    with watching(former_of(window).backbone, later=True) as seen:
        parts = cut_text(window, 1, [5])
        window.run(Arrange([*window.slots]))
    assert seen.forwards == 0, "all that stand know the parts as antecedents"
    window.run(Arrange([window[0], parts[0], window[3]]))
    first = former_of(window).backbone.chunk_from_tensors(IDS[:5])
    assert (
        relative(
            window.next_token_logits(QUESTION), Prefilled(former_of(window).backbone, [a, first, b]).logits
        )
        <= 1e-4
    )


def test_a_part_stays_as_the_survivor_that_the_whole_would_be():
    window, a, _ = window_of("qwen2_5_vl", STREAMING)
    window.run(Arrange([window[1], window[2]], on_leave="keep"))
    parts = cut_text(window, 0, [5])
    assert {slot.guarantee for slot in parts} == {"survivor"}
    assert parts[1].antecedents == (a.id, parts[0].chunk_id)
    with watching(former_of(window).backbone, later=True) as seen:
        window.run(Arrange([parts[0], window[2]], on_leave="keep"))
        window.flush()
    assert seen.forwards == 1, "the part that left is archived later"
    assert {slot.guarantee for slot in window} == {"survivor"}


def test_a_part_is_archived_when_it_leaves_and_a_cut_window_is_saved(tmp_path):
    window, *_ = window_of("qwen2_5_vl")
    parts = cut_text(window, 1, [5])
    want = window.next_token_logits(QUESTION)
    window.save(tmp_path / "w")
    loaded = KameraWindow.load(tmp_path / "w", former_of(window).backbone, ChunkStore.open("memory://"))
    assert torch.equal(loaded.next_token_logits(QUESTION), want)
    window.evict(parts[1])
    assert window.recall(parts[1].chunk_id).slot.length == 7
    fork = window.fork()
    cut_text(fork, 1, [2])
    assert len(fork) == len(window) + 1, "a fork is cut alone"


def test_a_picture_and_a_canonical_are_not_cut():
    window, *_ = window_of("qwen2_5_vl")
    assert cut_text(window, 0, [3]) == (window[0],) and cut_text(window, 2, [3]) == (window[2],)
    window.condition(1, False)
    assert cut_text(window, 1, [3]) == (window[1],), "it shows its canonical"
    window.condition(1, True)
    alone = KameraWindow(former_of(window).backbone, ChunkStore.open("memory://"), SYSTEM, policy=EXACT)
    alone.append(former_of(window).backbone.chunk_from_tensors(IDS))
    assert len(cut_text(alone, 0, [3])) == 1, "a leading text is its canonical"
    for outside in ([0], [12], [5, 5], [8, 3]):
        with pytest.raises(ValueError, match="ascending tokens inside"):
            cut_text(window, 1, outside)
    assert len(window) == 3
