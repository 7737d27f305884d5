"""Content as a transformers model takes it: what its processor, its configuration and its class say.

And encodings: what the full model would hand to its decoder, which is stopped where the decoder begins.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kamera.content import TOKEN_TYPES, Chunk, ChunkBuilder, Content, Encoded
from kamera.engines.base import Engine, Work
from kamera.engines.checkpoint import checkpoint_fingerprint
from kamera.engines.hf import probe
from kamera.engines.hf.hooks import OwnHook
from kamera.engines.hf.load import dtype_of, folder_of, load_processor, skeleton
from kamera.engines.hf.sampling import read_options
from kamera.errors import IncompatibleChunk, UnsupportedBackbone, first_line, quote
from kamera.ops import flat_lists

# The forward's name for a clip's seconds per temporal step -> the name get_rope_index uses.
_RENAMED = {"video_second_per_grid": "second_per_grids"}


class HfContents:
    """Chunks, token ids and positions of content. It runs no forward and reads no weight."""

    def __init__(self, model: nn.Module, processor: Any | None) -> None:
        model = probe.without_wrapper(model)
        probe.check_processor(processor)
        probe.refuse_unsupported(model)
        self.model: Any = model
        self.processor = processor
        self.decoder: Any = probe.find_decoder(model)
        self.config: Any = probe.text_config(model)
        self.axes = probe.position_axes(self.decoder)
        self.limits = probe.position_limits(model)
        self.towers = probe.find_vision_towers(model)
        self.builder = ChunkBuilder(model, processor, sees=bool(self.towers))

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides a chunk's KV."""
        raise NotImplementedError

    def chunk(self, content: Content) -> Chunk:
        return self._placed(self.builder.from_content(content, self.fingerprint))

    def chunk_from_tensors(
        self, input_ids: Any, *, label: str = "", picture: Any = None, **vision_inputs: Any
    ) -> Chunk:
        return self._placed(
            self.builder.from_tensors(input_ids, vision_inputs, self.fingerprint, label, picture)
        )

    def _placed(self, chunk: Chunk) -> Chunk:
        """The chunk, of which the model has positions. Raises IncompatibleChunk."""
        self.positions([chunk.input_ids], [chunk.position_inputs()])
        return chunk

    def positions(
        self, ids: Sequence[torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """As `Engine.positions`. Raises IncompatibleChunk for spans of which the model has none."""
        try:
            sequence_inputs = join_inputs([int(i.shape[0]) for i in ids], inputs)
            sequence = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
            return model_positions(self.model, self.axes, sequence, sequence_inputs)
        except (StopIteration, IndexError, RuntimeError, TypeError, ValueError) as error:
            # raised by get_rope_index for more or fewer pictures than grids
            grids = {name: i[name].tolist() for i in inputs for name in i if name.endswith("_grid_thw")}
            raise IncompatibleChunk(
                f"{type(self.model).__name__} has no positions for {sum(map(len, ids))} tokens with "
                f"{quote(grids)}: pictures and their grids are to be as the processor made them, "
                "mm_token_type_ids too, and a picture right behind another is one "
                "to the model (put text between them)"
            ) from error

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        read_options(self.model, sampling)


class ServedModel(HfContents):
    """The part of an `Engine` that sessions over another engine use. No weight is loaded, and none can run.

    ``name`` and ``dtype`` are as in `Backbone.from_pretrained`. Its fingerprint is `checkpoint_fingerprint`
    of its files as they are now. Raises UnsupportedBackbone for files without safetensors, and for a model
    whose state is no relocatable KV.
    """

    def __init__(self, name: str | Path, *, dtype: str | torch.dtype = "auto") -> None:
        super().__init__(skeleton(name, dtype=dtype_of(dtype)), load_processor(name))
        self._fingerprint = checkpoint_fingerprint(folder_of(name), dtype=str(self.model.dtype))

    @property
    def engine(self) -> Engine:
        """Itself: nothing else of an engine is used over another one."""
        return cast(Engine, self)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @contextmanager
    def measure(self) -> Iterator[Work]:
        """As `Engine.measure`: nothing is run here."""
        yield Work()


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
    sequence_inputs: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(n for i in inputs for n in i):
        if name in TOKEN_TYPES:
            parts = [
                i.get(name, torch.zeros(n, dtype=torch.int64)) for n, i in zip(lengths, inputs, strict=True)
            ]
        else:
            parts = [i[name] for i in inputs if name in i]
        sequence_inputs[name] = torch.cat(parts)
    return sequence_inputs


def model_positions(
    model: nn.Module, axes: int, input_ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Positions of ``input_ids`` ``[tokens]``: int64 ``[axes, tokens]`` on the CPU."""
    count = input_ids.shape[0]
    owner = rope_index_owner(model)
    grids = [n for n in inputs if n.endswith("_grid_thw")]
    if owner is None or count == 0 or not grids:
        return torch.arange(count).expand(axes, -1).clone()
    parameters = inspect.signature(owner.get_rope_index).parameters
    arguments: dict[str, torch.Tensor] = {
        "input_ids": input_ids[None],
        "attention_mask": torch.ones(1, count, dtype=torch.long),
    }
    for name, tensor in inputs.items():
        name = _RENAMED.get(name, name)
        arguments[name] = tensor[None] if name in TOKEN_TYPES else tensor
    arguments = {k: v for k, v in arguments.items() if k in parameters}
    positions, _ = owner.get_rope_index(**arguments)
    return torch.as_tensor(positions)[:, 0].to(device="cpu", dtype=torch.int64)


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
        return Encoded(chunk.input_ids, chunk.position_inputs(), {}, chunk.id, chunk.label)
    try:
        arguments = _capture_decoder_arguments(model, door, chunk.input_ids, positions, chunk.inputs)
    except (ValueError, RuntimeError, IndexError) as error:
        raise IncompatibleChunk(
            f"{type(model).__name__} refuses the inputs {sorted(chunk.inputs)} of chunk "
            f"{chunk.id[:12]}: {first_line(error)}"
        ) from error
    return Encoded(chunk.input_ids, chunk.position_inputs(), _content(arguments), chunk.id, chunk.label)


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
