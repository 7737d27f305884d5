"""Chunks: spans of tokens with the model inputs they need, ready to be prefilled anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
"""Per-token inputs, ``[tokens]`` in a chunk: 0 text, 1 image, 2 video."""

POSITION_INPUTS = (
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "video_second_per_grid",
    *TOKEN_TYPES,
)
"""What a model needs, besides token ids, to give a chunk its positions."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """One span of tokens that is stored and moved as a whole.

    ``id`` is a digest of the token ids and of every model input (processed pixels included), so two
    chunks of equal content are one chunk. ``input_ids`` is int64 ``[tokens]`` on the CPU; ``inputs``
    are the model's keyword arguments for it, per-token ones as ``[tokens]``. ``fingerprint`` is that
    of the backbone that built it.
    """

    id: str
    input_ids: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    fingerprint: str
    label: str = ""

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return int(self.input_ids.shape[0])

    @property
    def has_media(self) -> bool:
        """True when the vision tower has to see it."""
        return any(name not in POSITION_INPUTS for name in self.inputs)

    def position_inputs(self) -> dict[str, torch.Tensor]:
        """The inputs that fix its positions: small, and kept with its KV."""
        return {k: v for k, v in self.inputs.items() if k in POSITION_INPUTS}

    def __repr__(self) -> str:
        media = " with media" if self.has_media else ""
        return f"Chunk({self.id[:12]}, {self.num_tokens} tokens{media}, {self.label!r})"


@dataclass(frozen=True, eq=False)
class Encoded:
    """What the decoder needs for a chunk: nothing left for the vision tower to do.

    ``tensors`` are the decoder's own keyword arguments as the full model passed them (inputs_embeds,
    DeepStack features, …); empty for text, which is embedded from ``input_ids`` again.
    """

    input_ids: torch.Tensor
    position_inputs: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return int(self.input_ids.shape[0])
