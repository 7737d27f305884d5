"""Content as a transformers model takes it: what its processor, its configuration and its class say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kamera.content import Chunk, ChunkBuilder, Content
from kamera.engines.hf import positions as positioning
from kamera.engines.hf import probe
from kamera.engines.hf.sampling import check_options


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
        return self.builder.from_content(content, self.fingerprint)

    def chunk_from_tensors(
        self, input_ids: Any, *, label: str = "", picture: Any = None, **vision_inputs: Any
    ) -> Chunk:
        return self.builder.from_tensors(input_ids, vision_inputs, self.fingerprint, label, picture)

    def positions(
        self, ids: Sequence[torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        joined = positioning.join_inputs([int(i.shape[0]) for i in ids], inputs)
        sequence = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
        return positioning.model_positions(self.model, self.axes, sequence, joined)

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:
        check_options(self.model, sampling)
