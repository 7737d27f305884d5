"""The reader before it has learned: SmolVLM's vision transformer and connector, small, and begun as a sieve.

A vision transformer from random weights needs long to find that what belongs together stands together. Here
it begins with that: a part of each embedding says where a patch stands (one number a row, one a column), and
most heads of each layer begin by looking one or two patches to a side. All weights are trained from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer

from benchmarks.screen_reader.screens import PATCH, SIDE

WIDTH, LAYERS, HEADS, INNER = 192, 4, 6, 640
_GRID = SIDE // PATCH
_PLACE = 2 * _GRID
_HEAD = WIDTH // HEADS
_SEEN = (
    ((1, 0), (-1, 0), (0, 1), (0, -1), (2, 0)),
    ((1, 0), (-1, 0), (0, 1), (0, -1), (2, 0)),
    ((1, 0), (2, 0), (3, 0), (-1, 0), (-2, 0)),
    ((1, 0), (2, 0), (-1, 0), (0, 1)),
)
"""Steps to the right and down that the heads of each layer look at first."""


def config(text: dict[str, Any], image_token_id: int) -> Any:
    """The config of the whole model around a language model's."""
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    return Idefics3Config(
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        scale_factor=2,
        image_token_id=image_token_id,
        tie_word_embeddings=True,
    )


class Tower(nn.Module):
    """Vision transformer and connector, by the names that the whole model has for them."""

    vision_model: Any

    def __init__(self, whole: Any):
        super().__init__()
        whole.vision_config._attn_implementation = "sdpa"
        self.vision_model = Idefics3VisionTransformer(whole.vision_config)
        self.connector = Idefics3Connector(whole)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        embed = self.vision_model.embeddings
        filters = embed.patch_embedding.weight
        filters.normal_(0, 1.5 / filters[0].numel() ** 0.5)
        filters[: WIDTH * 3 // 4] -= filters[: WIDTH * 3 // 4].mean(
            (2, 3), keepdim=True
        )  # blind to the paper
        filters[-_PLACE:] = 0
        embed.patch_embedding.bias.zero_()
        places = embed.position_embedding.weight
        places.zero_()
        for row in range(_GRID):
            for column in range(_GRID):
                places[row * _GRID + column, [-_PLACE + column, -_GRID + row]] = 3.0
        for layer, seen in zip(self.vision_model.encoder.layers, _SEEN, strict=True):
            attention = layer.self_attn
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
                linear.weight.normal_(0, 0.5 / WIDTH**0.5)
                linear.bias.zero_()
            layer.mlp.fc1.weight.normal_(0, 1 / WIDTH**0.5)
            layer.mlp.fc2.weight.normal_(0, 0.3 / INNER**0.5)
            for head, (right, down) in enumerate(seen):
                _look(attention, head, right, down)
        self.connector.modality_projection.proj.weight.normal_(0, 0.5 / (4 * WIDTH) ** 0.5)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of [n, 3, 256, 256]: the embeddings of all squares [n, 64, 576], and [n, 256, width] in between."""
        embed = self.vision_model.embeddings
        hidden = embed.patch_embedding(pixels).flatten(2).transpose(1, 2) + embed.position_embedding.weight
        between = hidden
        for number, layer in enumerate(self.vision_model.encoder.layers, 1):
            hidden = layer(hidden, None)
            if number == 2:
                between = hidden
        return self.connector(self.vision_model.post_layernorm(hidden)), between


def _look(attention: Any, head: int, right: int, down: int) -> None:
    """Let a head look ``right`` and ``down`` from where it stands; sure of the place, but not deaf to it."""
    rows = slice(head * _HEAD, (head + 1) * _HEAD)
    for linear, (x, y) in ((attention.q_proj, (right, down)), (attention.k_proj, (0, 0))):
        linear.weight[rows] = 0
        for at in range(_GRID):
            for step, start in ((x, 0), (y, _GRID)):
                if 0 <= at + step < _GRID:
                    linear.weight[head * _HEAD + start + at + step, WIDTH - _PLACE + start + at] = 1.25
    attention.v_proj.weight[rows].normal_(0, 1 / WIDTH**0.5)
