"""Where survivors are served, a text takes over KV of texts that left in its place, and of an answer."""

from __future__ import annotations

import pytest
import torch

from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.content import Encoded
from kamera.engines import Span
from kamera.ops import kv_concat, kv_slice, kv_tokens, relocate_kv
from kamera.window import Arrange, former_of
from tests.engines.compare import worst
from tests.models import samples
from tests.window.rig import FULL_RANK, guarantees, live, make, rig

LAX = ReusePolicy(minimum="near", rank=FULL_RANK)
FAMILIES = ["qwen2_5_vl", "gemma3", "deepseek_v3", "llama_mqa"]
FIRST, SECOND, MORE = (samples.text_ids(n, seed=s) for n, s in ((9, 31), (12, 32), (3, 33)))


def text(backbone, *spans: torch.Tensor) -> Chunk:
    return backbone.chunk_from_tensors(torch.cat(spans), label="text")


def opened(family: str, policy: ReusePolicy = LAX) -> tuple[KameraWindow, list[Chunk]]:
    """A window of a text, a picture, a text and another picture, as an agent's message and its next."""
    backbone, (a, b, *_) = rig(family)
    chunks = [text(backbone, FIRST), a, text(backbone, SECOND), b]
    return make(backbone, None, *chunks, policy=policy), chunks


def whole(window: KameraWindow, *more: Chunk) -> Chunk:
    """The two texts as one, with three tokens more."""
    return text(former_of(window).backbone, FIRST, SECOND, MORE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_in_the_place_of_others_runs_its_new_tokens_alone(family):
    """Its KV is theirs, moved from where it was computed, and that of the rest is a forward behind it."""
    window, _ = opened(family)
    layout, axes, new = former_of(window).backbone.layout, former_of(window).backbone.axes, whole(window)
    old = [live(window, i) for i in range(4)]
    starts = [slot.position for slot in window.slots]
    plan = window.plan(Arrange([new, window[3]], on_leave="keep"))
    report = window.run(Arrange([new, window[3]], on_leave="keep"))
    assert (report.forwards, report.tokens_recomputed) == (1, len(MORE))
    assert (plan.cost.forwards, plan.cost.tokens) == (1, len(MORE))
    assert report.bytes_rotated > 0
    assert report.tokens_held == len(FIRST) + len(SECOND)
    made, home = live(window, 0), starts[0]
    moved = relocate_kv(old[2], layout, (home + len(FIRST) - starts[2],) * axes)
    taken = kv_concat([old[0], moved])
    assert worst(kv_slice(made, 0, kv_tokens(taken)), taken) <= 1e-5
    engine, anchor = former_of(window).backbone, former_of(window).anchor
    cache = engine.live()
    cache.show([Span(anchor.kv, None, (0,) * axes), Span(taken, None, (0,) * axes)], room=len(MORE))
    places = torch.arange(home + kv_tokens(taken), home + new.num_tokens).expand(axes, -1)
    rest = engine.prefill([Encoded(MORE, {}, {})], [places], cache)[0]
    assert worst(kv_slice(made, kv_tokens(taken), new.num_tokens), rest) <= 1e-4
    assert guarantees(window)[0] == "survivor"


def test_what_is_taken_over_is_never_stored_as_a_patch():
    store = ChunkStore.open("memory://")
    backbone, (a, b, *_) = rig("llama_mqa")
    policy = ReusePolicy(minimum="near", rank=FULL_RANK, forms="always")
    window = make(backbone, store, a, text(backbone, FIRST), b, text(backbone, SECOND), policy=policy)
    new = text(backbone, FIRST, SECOND, MORE)
    window.run(Arrange([window[0], new], on_leave="keep"))
    assert window.slots[1].guarantee == "survivor"
    window.evict(1)
    window.flush()
    kept = {(info.kind, info.chunk_id) for info in store.ls()}
    assert ("canonical", new.id) in kept and ("exact", new.id) not in kept
