"""Run everything before the decoder once, and keep what the decoder would have received.

The full model is called with its decoder stopped at the door: the keyword arguments it was about to
get (embeddings with vision features scattered in, DeepStack features, expert routing types, …) are the
chunk's encoding. Prefilling from them later is the same arithmetic, with no pixels and no vision tower.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kamera.backbones.chunk import TOKEN_TYPES, Chunk, Encoded
from kamera.errors import IncompatibleChunk

_NOT_CONTENT = ("input_ids", "position_ids", "attention_mask", "past_key_values")
_LIST = re.compile(r"^(.+)\.(\d+)$")


class _AtTheDoor(Exception):
    """Stops the full model's forward where its decoder would begin."""


def encode(model: nn.Module, decoder: nn.Module, chunk: Chunk, positions: torch.Tensor) -> Encoded:
    """Encode a chunk's media.

    ``positions`` ``[axes, tokens]`` keep the model from deriving (and remembering) its own.
    """
    if not chunk.has_media:
        return Encoded(chunk.input_ids, chunk.position_inputs(), {})
    try:
        caught = _at_the_door(model, decoder, chunk.input_ids, positions, chunk.inputs)
    except (ValueError, RuntimeError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise IncompatibleChunk(
            f"{type(model).__name__} refuses the inputs {sorted(chunk.inputs)} of chunk "
            f"{chunk.id[:12]}: {first}"
        ) from error
    return Encoded(chunk.input_ids, chunk.position_inputs(), _flatten(caught))


def mask_input(
    model: nn.Module, decoder: nn.Module, ids: torch.Tensor, positions: torch.Tensor
) -> str | None:
    """The per-token input from which the outer model builds the attention mask itself, if it does.

    Such a model (bidirectional picture blocks: Gemma 3, Gemma 4) hands its decoder a finished mask.
    """
    if _at_the_door(model, decoder, ids, positions, {}).get("attention_mask") is None:
        return None
    accepted = inspect.signature(model.forward).parameters
    return next((n for n in ("token_type_ids", "mm_token_type_ids") if n in accepted), None)


def _at_the_door(
    model: nn.Module,
    decoder: nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """The keyword arguments the full model would have called its decoder with."""
    caught: dict[str, Any] = {}

    def stop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        caught.update(kwargs)
        raise _AtTheDoor

    device = next(model.parameters()).device
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    handle = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(
            input_ids=ids[None].to(device),
            position_ids=batched(positions).to(device),
            **{n: _model_input(n, t, device, dtype) for n, t in inputs.items()},
        )
    except _AtTheDoor:
        pass
    finally:
        handle.remove()
    return caught


def decoder_arguments(encoded: Encoded, device: torch.device) -> dict[str, Any]:
    """The captured arguments as the decoder takes them, on ``device``."""
    if not encoded.tensors:
        return {"input_ids": encoded.input_ids[None].to(device)}
    arguments: dict[str, Any] = {}
    for name, tensor in encoded.tensors.items():
        match = _LIST.match(name)
        if match:
            arguments.setdefault(match.group(1), []).append(tensor.to(device))
        else:
            arguments[name] = tensor.to(device)
    return arguments


def batched(positions: torch.Tensor) -> torch.Tensor:
    """``[axes, tokens]`` as transformers takes it: ``[1, tokens]`` or ``[3, 1, tokens]``."""
    return positions if positions.shape[0] == 1 else positions[:, None]


def _model_input(name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if name in TOKEN_TYPES:
        tensor = tensor[None]
    # pixels follow the weights' dtype; times and sizes keep theirs
    cast = dtype if tensor.is_floating_point() and "pixel" in name else tensor.dtype
    return tensor.to(device=device, dtype=cast)


def _flatten(caught: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensor arguments by name; lists of tensors as ``name.0``, ``name.1``, …"""
    flat: dict[str, torch.Tensor] = {}
    for name, value in caught.items():
        if name in _NOT_CONTENT:
            continue
        if isinstance(value, torch.Tensor):
            flat[name] = value.detach()
        elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            flat.update({f"{name}.{i}": v.detach() for i, v in enumerate(value)})
    return flat
