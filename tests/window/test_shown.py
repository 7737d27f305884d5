"""A window hands out the spans of its live cache: inputs, positions and KV that belong together."""

from __future__ import annotations

import torch

from kamera import ChunkStore, KameraWindow
from kamera.ops import KV, kv_map
from kamera.window import sequence_of, shown_spans, with_kv
from tests.reuse.rig import FULL, HEAD, family, words


def same(one: KV, other: KV) -> bool:
    return all(torch.equal(a[n], b[n]) for a, b in zip(one, other, strict=True) for n in a)


def test_shown_spans_are_the_window_in_order():
    backbone = family("llama_mqa")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), HEAD, policy=FULL)
    for seed in (1, 2, 3):
        window.append(backbone.chunk_from_tensors(words(seed, 9 + seed)))
    window.slide(1)  # the frame moves with the survivors
    spans = shown_spans(window)
    assert torch.equal(torch.cat([s.encoded.input_ids for s in spans]), sequence_of(window).input_ids)
    positions = torch.cat([s.positions for s in spans], dim=1)
    assert len({int(d) for d in (positions - sequence_of(window).position_ids).flatten()}) == 1
    assert all(same(span.kv, window._stage.live.read(i)) for i, span in enumerate(spans))
    fresh = backbone.prefill([spans[0].encoded], [spans[0].positions])[0]
    assert all(
        torch.allclose(a[n], b[n], atol=1e-5) for a, b in zip(spans[0].kv, fresh, strict=True) for n in a
    )


def test_writing_to_a_shown_span_changes_no_answer():
    backbone = family("llama_mqa")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), HEAD, policy=FULL)
    window.append(backbone.chunk_from_tensors(words(1, 9)))
    before = window.next_token_logits(words(5, 4))
    for span in shown_spans(window):
        for layer in span.kv:
            for tensor in layer.values():
                tensor.zero_()
    assert torch.equal(window.next_token_logits(words(5, 4)), before)


def test_a_fork_with_other_kv_answers_by_that_and_the_window_by_its_own():
    backbone = family("llama_mqa")
    window = KameraWindow(backbone, ChunkStore.open("memory://"), HEAD, policy=FULL)
    for seed in (1, 2, 3):
        window.append(backbone.chunk_from_tensors(words(seed, 9 + seed)))
    window.slide(1)
    window.condition(1, False)
    question = words(5, 4)
    before = window.next_token_logits(question)
    own = [span.kv for span in shown_spans(window)[1:]]
    none = [kv_map(kv, torch.zeros_like) for kv in own]
    for kvs, alike in ((own, True), (none, False)):
        fork = with_kv(window, kvs)
        assert torch.equal(fork.next_token_logits(question), before) == alike
        assert all(same(span.kv, kv) for span, kv in zip(shown_spans(fork)[1:], kvs, strict=True))
        assert torch.equal(window.next_token_logits(question), before)
