"""Sessions on a tiny model with a real processor, and the plain model they are held against."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.sessions import ChatSession
from tests.content import templates
from tests.models import families, processors, tiny

EXACT = ReusePolicy(minimum="exact", on_miss="prefill")
FULL = ReusePolicy(rank=64, patch_bytes=None, forms="always")
"""Patches of full rank."""

Messages = list[dict[str, Any]]


@functools.cache
def seeing() -> HfEngine:
    """A tiny Qwen2.5-VL with its picture processor."""
    return HfEngine(processors.matching_model(), templates.seeing())


@functools.cache
def speaking(style: str) -> HfEngine:
    """A tiny Llama under a template style."""
    tokenizer = templates.speaker(style)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    tiny.randomise(model, 1)
    return HfEngine(model, tokenizer)


def session(backbone: HfEngine, policy: ReusePolicy = EXACT, **options: Any) -> ChatSession:
    """A session on a store of its own."""
    return ChatSession(backbone, ChunkStore.open("memory://"), policy=policy, **options)


def plain_logits(backbone: HfEngine, messages: Messages, tools: Any = None) -> torch.Tensor:
    """Logits ``[vocabulary]`` behind the whole prompt, as transformers runs it with nothing cached."""
    return families.plain_logits(backbone.model, families.whole_prompt(backbone.processor, messages, tools))
