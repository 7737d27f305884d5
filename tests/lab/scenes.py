"""Scenes on the tiny families: pictures and a text under one system prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera import Chunk
from kamera.engines.hf import HfEngine
from lab.scene import Scene
from tests.models import samples
from tests.window.rig import SYSTEM, rig

FAMILIES = {
    "GQA, M-RoPE": "qwen2_5_vl",
    "deepstack": "qwen3_vl",
    "MHA": "deepseek_vl",
    "MLA": "kimi_k25",
    "partial rotary": "glm4v",
}
FULL = 64
"""More than any chunk here has tokens."""


def questions(*lengths: int) -> list[torch.Tensor]:
    """Different questions of these lengths in tokens."""
    return [samples.text_ids(n, seed=40 + i) for i, n in enumerate(lengths)]


def chunks_of(family: str, count: int = 4) -> tuple[HfEngine, list[Chunk]]:
    """A backbone, and chunks of which the last is text."""
    return rig(family, count)


def scene_of(family: str, antecedents: int = 3, system: torch.Tensor = SYSTEM) -> Scene:
    """A picture (text where the family sees none) behind pictures and a text."""
    backbone, chunks = rig(family, antecedents + 1)
    return Scene(backbone, system, chunks[1:], chunks[0])


def fresh(scene: Scene, antecedents: Sequence[Chunk]) -> Scene:
    """The target behind ``antecedents`` with nothing shared or kept."""
    return Scene(scene.backbone, scene.anchor.input_ids, antecedents, scene.target)
