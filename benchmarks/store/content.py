"""Records of noise, and windows that are about to show four stored patches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy
from kamera.ops import RopeSpec, kv_of
from kamera.ops.layout import Layout, attention_layout
from kamera.store import CanonicalRecord, Context
from kamera.store.search import pack, unit_vector

CONTEXT = Context("f" * 64, "a" * 64)
_HEADS = 2


def gqa(layers: int, dim: int) -> Layout:
    """The layout of `canonical`: GQA with 1-D positions."""
    freq = tuple(10_000.0 ** (-2 * i / dim) for i in range(dim // 2))
    rope = RopeSpec(freq, (0,) * len(freq), 1, "half")
    return [attention_layout(_HEADS, 2 * _HEADS, dim, dim, rope)] * layers


def canonical(number: int, tokens: int, dim: int, layers: int = 4) -> CanonicalRecord:
    """A chunk's KV of noise, float32; equal numbers give equal records."""
    made = torch.Generator().manual_seed(number)
    shape = (_HEADS, tokens, dim)
    return CanonicalRecord(
        chunk_id=f"{number:064x}",
        context=CONTEXT,
        input_ids=torch.randint(0, 1000, (tokens,), generator=made),
        positions=torch.arange(tokens).expand(1, tokens),
        kv=kv_of([{c: torch.randn(shape, generator=made) for c in ("k", "v")} for _ in range(layers)]),
    )


def pictured(number: int, width: int = 128) -> CanonicalRecord:
    """A chunk of one token with the features of a picture."""
    vector = unit_vector(np.random.default_rng(number).standard_normal(width))
    return CanonicalRecord(
        chunk_id=f"{number:064x}",
        context=CONTEXT,
        input_ids=torch.tensor([number]),
        positions=torch.zeros(1, 1, dtype=torch.int64),
        kv=kv_of([{"k": torch.zeros(1, 1, 2)}]),
        embedding=pack(vector),
    )


def patched_window(url: str, operation: str) -> tuple[Callable[[], object], KameraWindow]:
    """A slide or a reorder that shows four stored patches, 28 layers, and its window."""
    policy = ReusePolicy(on_leave="repair")
    backbone = _backbone()
    window = KameraWindow(backbone, ChunkStore.open(url), torch.arange(2, 10), policy=policy)
    for i in range(6 if operation == "slide" else 5):
        window.append(backbone.chunk_from_tensors(torch.arange(12) + 20 * i + 30))
    window.flush()

    def work(window: KameraWindow = window) -> object:
        return window.slide() if operation == "slide" else window.reorder([0, 2, 1, 4, 3])

    branch = window.fork()  # what the operation needs is formed and stored by doing it there
    work(branch)
    branch.flush()
    return work, window


def _backbone() -> Backbone:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=28,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Backbone(LlamaForCausalLM(config).eval())
