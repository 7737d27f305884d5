"""Content as a transformers model takes it: what its processor, its configuration and its class say."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kamera.content import TOKEN_TYPES, Chunk, ChunkBuilder, Content
from kamera.engines.base import Engine
from kamera.engines.checkpoint import checkpoint_fingerprint
from kamera.engines.hf import probe
from kamera.engines.hf.load import dtype_of, folder_of, load_processor, skeleton
from kamera.engines.hf.sampling import read_options
from kamera.engines.values import Work
from kamera.errors import IncompatibleChunk, quote

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
