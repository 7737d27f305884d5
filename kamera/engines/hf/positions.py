"""The model's own positions: its ``get_rope_index`` over the whole token sequence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kamera.content import TOKEN_TYPES

# The forward's name for a clip's seconds per temporal step -> the name get_rope_index uses.
_RENAMED = {"video_second_per_grid": "second_per_grids"}


def rope_index_owner(model: nn.Module) -> Any | None:
    """The module with ``get_rope_index`` (inner model, or the top class for Omni thinkers)."""
    for candidate in (getattr(model, "model", None), model):
        if hasattr(candidate, "get_rope_index"):
            return candidate
    return None


def join_inputs(
    lengths: Sequence[int], inputs: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Position inputs of consecutive spans, joined as those of one sequence.

    A span without a per-token input counts as text (0) in it; grids are stacked in order.
    """
    joined: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(n for i in inputs for n in i):
        if name in TOKEN_TYPES:
            parts = [
                i.get(name, torch.zeros(n, dtype=torch.int64)) for n, i in zip(lengths, inputs, strict=True)
            ]
        else:
            parts = [i[name] for i in inputs if name in i]
        joined[name] = torch.cat(parts)
    return joined


def model_positions(
    model: nn.Module, axes: int, input_ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Positions of ``input_ids`` ``[tokens]``: int64 ``[axes, tokens]`` on the CPU."""
    count = input_ids.shape[0]
    owner = rope_index_owner(model)
    grids = [n for n in inputs if n.endswith("_grid_thw")]
    if owner is None or count == 0 or not grids:
        return torch.arange(count).expand(axes, -1).clone()
    accepted = inspect.signature(owner.get_rope_index).parameters
    named: dict[str, torch.Tensor] = {
        "input_ids": input_ids[None],
        "attention_mask": torch.ones(1, count, dtype=torch.long),
    }
    for name, tensor in inputs.items():
        name = _RENAMED.get(name, name)
        named[name] = tensor[None] if name in TOKEN_TYPES else tensor
    named = {k: v for k, v in named.items() if k in accepted}
    positions, _ = owner.get_rope_index(**named)
    return torch.as_tensor(positions)[:, 0].to(device="cpu", dtype=torch.int64)
