"""Prompts of token ids on tiny models, and the plain model they are held against."""

from __future__ import annotations

import functools

import torch

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.reuse import Prompt, Reuser
from tests.models import tiny

FULL = ReusePolicy(rank=64, patch_bytes=None, forms="always")
"""Patches of full rank."""

HEAD = torch.tensor([5, 6, 7, 8])
"""The first tokens of every prompt: its sink."""


def words(seed: int, count: int) -> torch.Tensor:
    return torch.randint(9, 140, (count,), generator=torch.Generator().manual_seed(seed))


@functools.cache
def parts() -> tuple[torch.Tensor, ...]:
    """Four segments and a question."""
    return tuple(words(seed, count) for seed, count in ((1, 12), (2, 17), (3, 9), (4, 14), (5, 6)))


def prompt(*spans: torch.Tensor) -> Prompt:
    """A prompt of the sink and ``spans``, cut between them; the last is the question."""
    ids, anchors = torch.cat([HEAD, *spans]), []
    at = len(HEAD)
    for span in spans:
        anchors.append(at)
        at += len(span)
    return Prompt.of(ids.numpy(), anchors=anchors)


def reuser(
    backbone: HfEngine, store: ChunkStore | None = None, policy: ReusePolicy = FULL, **options
) -> Reuser:
    return Reuser(backbone, store or ChunkStore.open("memory://"), policy, **options)


def plain(backbone: HfEngine, asked: Prompt) -> torch.Tensor:
    """Logits ``[vocabulary]`` of the plain model over the whole prompt."""
    ids = torch.as_tensor(asked.ids.astype("int64"))[None]
    with torch.no_grad():
        return backbone.model(input_ids=ids).logits[0, -1]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def family(name: str) -> HfEngine:
    return tiny.backbone(name)
