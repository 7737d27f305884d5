"""A window holds about the bytes of a plain cache, and growth copies a token a bounded number of times."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kamera import Chunk, ChunkStore, KameraWindow
from kamera.engines import Span, Written
from kamera.engines.hf import HfEngine
from kamera.ops import kv_bytes
from kamera.window import sequence_of
from tests.content import templates
from tests.models import samples, tiny
from tests.sessions.rig import EXACT

MOST = 1.15
SYSTEM = torch.arange(30) + 3
SIZES = (256, 300, 512, 700, 1089, 1500, 2048)
LONG = (3000, 4096, 8192)


@functools.cache
def engine() -> HfEngine:
    """A small Llama whose KV is as large beside its ids and positions as that of a real one."""
    words = templates.speaker("headers")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=16384,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    tiny.randomise(model, 1)
    return HfEngine(model, words)


def plain_bytes(tokens: int) -> int:
    """Bytes of the plain model's own cache of so many tokens."""
    cache = DynamicCache()
    with torch.no_grad():
        engine().model.model(samples.text_ids(tokens)[None], past_key_values=cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def text(tokens: int, seed: int = 0) -> Chunk:
    return engine().chunk_from_tensors(samples.text_ids(tokens, seed=seed))


def filled(tokens: int, each: int = 64, backbone: HfEngine | None = None) -> KameraWindow:
    """A window of so many tokens, appended a few at a time."""
    window = KameraWindow(backbone or engine(), ChunkStore.open("memory://"), SYSTEM, policy=EXACT)
    left, seed = tokens - len(SYSTEM), 0
    while left:
        window.append(text(min(each, left), seed))
        left, seed = left - min(each, left), seed + 1
    return window


def share(window: KameraWindow, said: int = 0) -> float:
    """Bytes of a window for each of a plain cache of its tokens, and those that were ``said`` behind them."""
    tokens = sequence_of(window).input_ids.shape[0] + said
    return window.memory().total / (tokens * engine().facts.bytes_per_token)


@pytest.mark.few(1)
@pytest.mark.parametrize("tokens", [*SIZES, *(pytest.param(n, marks=pytest.mark.slow) for n in LONG)])
def test_a_window_holds_little_more_than_a_plain_cache(tokens, capsys):
    window = filled(tokens)
    assert window.memory().total <= MOST * plain_bytes(tokens)
    shares = {"appended": share(window)}
    window.next_token_logits("what?")
    window.generate("what?", max_new_tokens=40, min_new_tokens=40, do_sample=False)
    shares["asked"] = share(window)
    branch = window.fork()
    branch.append(text(50, seed=99))
    shares["forked"] = share(branch)
    del branch
    window.append(text(70, seed=98))
    shares["appended again"] = share(window)
    while len(window) > 1 and sequence_of(window).input_ids.shape[0] - window.slots[-1].length >= 256:
        window.evict(len(window) - 1)
        window.next_token_logits("what?")  # a forward gives back what a departure left
        shares["left"] = max(share(window), shares.get("left", 0.0))
    with capsys.disabled():
        print(f"\n{tokens:6} tokens  " + "  ".join(f"{n} {s:.3f}" for n, s in shares.items()), end="")
    assert max(shares.values()) <= MOST


def tensors() -> list[torch.Tensor]:
    """All tensors in this process."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]


@pytest.mark.slow
def test_two_hundred_short_turns_copy_each_token_a_bounded_number_of_times():
    backbone, still = engine(), (0,)
    live = backbone.live(holds=True)
    (anchor,) = backbone.prefill([backbone.encode(text(30))], [torch.arange(30)[None]])
    spans, copied, worst = [Span(anchor, None, still)], Written(), 0.0
    for turn in range(200):
        tokens = 30 + 20 * turn
        copied += live.show(spans, room=20)
        encoded = backbone.encode(text(20, seed=turn))
        (kv,) = backbone.prefill([encoded], [torch.arange(tokens, tokens + 20)[None]], live)
        spans.append(Span(kv, None, still))
        copied += live.show(spans)
        if tokens >= 256:
            worst = max(worst, kv_bytes(live.tensors) / ((tokens + 20) * backbone.facts.bytes_per_token))
    whole = (30 + 20 * 200) * backbone.facts.bytes_per_token
    assert copied.bytes_copied <= 20 * whole
    assert worst <= MOST
