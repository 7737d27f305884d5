"""Run everything before the decoder once, and keep the arguments that the decoder would have received.

The full model is called, and a hook (the door) stops it before its decoder: the keyword arguments of the
decoder (embeddings with vision features scattered in, DeepStack features, expert routing types, …) are the
chunk's encoding. Prefilling from them later is the same arithmetic, with no pixels and no vision tower.

The door is a permanent hook, shut only for the thread that asked for it: a forward of any other thread,
such as a user's own, passes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kamera.content import TOKEN_TYPES, Chunk, Encoded
from kamera.engines.hf.hooks import OwnHook
from kamera.errors import IncompatibleChunk, UnsupportedBackbone, first_line
from kamera.ops import flat_lists

SEEN = "visual_pos_masks"
"""An argument of decoders: bool ``[1, tokens]``, True for the tokens that picture features replace."""

_NOT_CONTENT = ("input_ids", "position_ids", "attention_mask", "past_key_values")


class _AtTheDoor(Exception):
    """Stops the full model's forward where its decoder would begin."""


class DecoderHook(OwnHook):
    """A hook before a decoder. Shut, it stops the thread that shut it and keeps the decoder's arguments."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__(self._stop)
        self._decoder = decoder
        self._shut = threading.local()
        self._install_hook()

    def __call__(self, *arguments: Any) -> Any:
        """Called as a hook before all others, which the kept arguments pass when they are prefilled."""
        return self._stop(*arguments)

    @contextmanager
    def capture_arguments(self) -> Iterator[dict[str, Any]]:
        """Stop forwards of this thread at the decoder, in the block; the dict gets its keyword arguments."""
        self._install_hook()
        arguments: dict[str, Any] = {}
        self._shut.arguments = arguments
        try:
            yield arguments
        except _AtTheDoor:
            return
        finally:
            self._shut.arguments = None
        raise UnsupportedBackbone(
            f"{type(self._decoder).__name__} was not called by its model: what it would receive for a "
            "picture cannot be kept"
        )

    @contextmanager
    def substitute_inputs(self, content: Mapping[str, Any]) -> Iterator[None]:
        """In the block, hand ``content`` to the decoder instead of the tokens of this thread's next forward.

        ``content`` are `decoder_arguments`; of none (text) the forward passes as it is.
        """
        self._install_hook()
        self._shut.content = None if "input_ids" in content else content
        try:
            yield
        finally:
            self._shut.content = None

    def _install_hook(self) -> None:
        if self not in self._decoder._forward_pre_hooks.values():  # all of them may have been removed
            self._decoder.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def _stop(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = getattr(self._shut, "arguments", None)
        if arguments is not None:
            arguments.update(kwargs)
            raise _AtTheDoor
        content = getattr(self._shut, "content", None)
        if content is None:
            return None
        self._shut.content = None
        return args, {**kwargs, "input_ids": None, **content}


def encode(model: nn.Module, door: DecoderHook, chunk: Chunk, positions: torch.Tensor) -> Encoded:
    """Encode a chunk's media.

    ``positions`` ``[axes, tokens]`` keep the model from deriving (and remembering) its own.
    """
    if not chunk.has_media:
        return Encoded(chunk.input_ids, chunk.position_inputs(), {})
    try:
        arguments = _capture_decoder_arguments(model, door, chunk.input_ids, positions, chunk.inputs)
    except (ValueError, RuntimeError, IndexError) as error:
        raise IncompatibleChunk(
            f"{type(model).__name__} refuses the inputs {sorted(chunk.inputs)} of chunk "
            f"{chunk.id[:12]}: {first_line(error)}"
        ) from error
    return Encoded(chunk.input_ids, chunk.position_inputs(), _content(arguments))


def text_tensors(
    model: nn.Module, door: DecoderHook, ids: torch.Tensor, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors that the decoder receives for a text: what `encode` keeps of a chunk with media."""
    return _content(_capture_decoder_arguments(model, door, ids, positions, {}))


def mask_input_name(
    model: nn.Module, door: DecoderHook, ids: torch.Tensor, positions: torch.Tensor
) -> str | None:
    """The per-token input from which the outer model builds the attention mask itself, if it does.

    Such a model (bidirectional picture blocks: Gemma 3, Gemma 4) hands its decoder a finished mask.
    """
    if _capture_decoder_arguments(model, door, ids, positions, {}).get("attention_mask") is None:
        return None
    parameters = inspect.signature(model.forward).parameters
    return next((n for n in ("token_type_ids", "mm_token_type_ids") if n in parameters), None)


def _capture_decoder_arguments(
    model: nn.Module,
    door: DecoderHook,
    ids: torch.Tensor,
    positions: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """The keyword arguments the full model would have called its decoder with."""
    device = input_device(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    with door.capture_arguments() as arguments:
        model(
            input_ids=ids[None].to(device),
            position_ids=with_batch(positions).to(device),
            **{n: _model_input(n, t, device, dtype) for n, t in inputs.items()},
        )
    return arguments


def decoder_arguments(encoded: Encoded, device: torch.device) -> dict[str, Any]:
    """The captured arguments as the decoder takes them, on ``device``."""
    if not encoded.tensors:
        return {"input_ids": encoded.input_ids[None].to(device)}
    return {
        name: [entry.to(device) for entry in value] if isinstance(value, list) else value.to(device)
        for name, value in encoded.arguments.items()
    }


def is_flat(name: str) -> bool:
    """True for features of one of several layers: ``[vision tokens, width]``, in the order of `SEEN`."""
    return name.rpartition(".")[0] == "deepstack_visual_embeds"


def input_device(model: nn.Module) -> torch.device:
    """The device of token ids."""
    return next(model.parameters()).device


def with_batch(positions: torch.Tensor) -> torch.Tensor:
    """``[axes, tokens]`` as transformers takes it: ``[1, tokens]`` or ``[3, 1, tokens]``."""
    return positions if positions.shape[0] == 1 else positions[:, None]


def _model_input(name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if name in TOKEN_TYPES:
        tensor = tensor[None]
    # pixels follow the weights' dtype; times and sizes keep theirs
    cast = dtype if tensor.is_floating_point() and "pixel" in name else tensor.dtype
    return tensor.to(device=device, dtype=cast)


def _content(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The arguments that are tensors or lists of tensors, by name."""
    content = {name: value for name, value in arguments.items() if name not in _NOT_CONTENT and _holds(value)}
    return {name: tensor.detach() for name, tensor in flat_lists(content).items()}


def _holds(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)
    return isinstance(value, torch.Tensor) or is_list
