"""A model's shape and how it is built: full size, real classes of transformers, weights of noise.

Depth can be cut for small machines (`Preset.build`): width, heads and head size, which decide bytes per
token and work per token of a layer, stay. With the depth goes the vocabulary, whose embedding would
otherwise outweigh the layers that are left; the last token alone reads it, in all arms alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from kamera.engines.hf import HfEngine

IMAGE, VISION_START, VISION_END, VIDEO = 3, 4, 5, 6
"""Special token ids, low in every preset so that a cut vocabulary has them."""
FIRST_WORD = 16
"""Ordinary token ids begin here."""
CUT_VOCABULARY = 4096
"""Entries of the vocabulary of a preset whose depth is cut."""

Pictures = Literal["patches", "grid", "square"]
"""How a family takes pixels: Qwen's flat patches, Kimi's patches, whole square pictures."""

_WRITTEN = 1 << 22  # weights are one block of noise of about this many values, repeated


@dataclass(frozen=True)
class Preset:
    """A published model's shape.

    ``config`` are the arguments of ``<model>Config`` of transformers, ``depth`` where in its vision part
    the number of layers stands, ``taps`` which vision settings name layers. ``stands_for`` says in one
    line what differs from the checkpoint it is named after, besides weights and token ids.
    """

    name: str
    checkpoint: str
    stands_for: str
    model: str
    pictures: Pictures
    depth: str
    config: Mapping[str, Any]
    taps: tuple[str, ...] = ()

    @property
    def text(self) -> Mapping[str, Any]:
        """The decoder's numbers."""
        text: Mapping[str, Any] = self.config["text_config"]
        return text

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision tower's numbers."""
        vision: Mapping[str, Any] = self.config["vision_config"]
        return vision

    def build(
        self,
        layers: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int = 0,
        same_weights: bool = False,
    ) -> HfEngine:
        """The model with random weights, its first ``layers`` layers (None: all) of decoder and tower.

        Rotary buffers stay float32, as ``from_pretrained`` leaves them. With ``same_weights`` layers of one
        shape hold the very same tensors: the KV and the work of all of them, in the memory of one.
        """
        kind: Any = getattr(transformers, f"{self.model}Config")
        made = kind(**self.cut(layers), tie_word_embeddings=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), no_init_weights():
                model = getattr(transformers, f"{self.model}ForConditionalGeneration")(made).eval()
        finally:
            torch.set_default_dtype(before)
        if same_weights:
            _share_layers(model)
        fill(model, seed)
        return HfEngine(model.requires_grad_(False))

    def cut(self, layers: int | None) -> dict[str, Any]:
        """The arguments of the config class with depth and vocabulary cut; as they are for None."""
        config = {**self.config, "text_config": dict(self.text), "vision_config": dict(self.vision)}
        if layers is None:
            return config
        text, vision = config["text_config"], config["vision_config"]
        text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
        text["vocab_size"] = min(CUT_VOCABULARY, text["vocab_size"])
        vision[self.depth] = min(layers, vision[self.depth])
        for tap in self.taps:  # as many of them as there are layers left, the last ones
            kept = vision[tap][: vision[self.depth]]
            vision[tap] = list(range(vision[self.depth] - len(kept), vision[self.depth]))
        return config


def _share_layers(model: nn.Module) -> None:
    for stack in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        first: dict[tuple[Any, ...], nn.Module] = {}
        for layer in stack:
            form = tuple((name, weight.shape) for name, weight in layer.named_parameters())
            twin = first.setdefault(form, layer)
            for module, other in zip(layer.modules(), twin.modules(), strict=True):
                module._parameters = other._parameters


def fill(model: nn.Module, seed: int) -> None:
    """Write every weight: noise of std 0.02, ones for norms, zeros for biases. Seconds for billions.

    Copies of one block of noise, shifted against each other: timings ask no more of them.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(_WRITTEN + 3).normal_(0.0, 0.02, generator=generator)
    blocks: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            where = (weight.device, weight.dtype)
            block = blocks.setdefault(where, noise.to(*where))
            flat = weight.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:  # uninitialised otherwise: which experts are preferred
                buffer.zero_()
