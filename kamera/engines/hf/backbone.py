"""A Hugging Face model behind one interface: chunks of content, facts, and the engine that runs it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kamera.content import Chunk, Content, MediaLimits
from kamera.engines.base import Work
from kamera.engines.hf.engine import HfEngine
from kamera.engines.hf.load import (
    device_of,
    dtype_of,
    files_behind,
    fingerprint_of,
    load_model,
    load_processor,
)


@dataclass(frozen=True)
class Description:
    """Facts read off a live model (`Backbone.describe`)."""

    model_class: str
    model_type: str
    family: str
    layers: int
    kv_layers: int
    channels: tuple[str, ...]
    bytes_per_token: int
    dtype: str
    devices: tuple[str, ...]
    attention: str
    position_axes: int
    rotary_dim: int
    pairing: str
    axis_order: str
    attention_scaling: float
    position_limit: int | None
    limit_reason: str
    takes_pixels: bool
    serial_decode: str
    fingerprint: str
    variant: str


class Backbone:
    """A loaded transformers model (and its processor) that Kamera can cut, move and patch.

    Construction probes the model (the channels of each layer, the phase of its keys), and proves on a few
    tokens that moving them is exact. Raises UnsupportedBackbone, with the reason, for a model whose state is
    not relocatable KV. A model whose forward depends on how its tokens are cut is served without reuse: the
    reason is in ``no_reuse`` and in the log, windows refuse the model, and sessions with ``uncached`` answer
    by ``generate`` of transformers. The model's weights and mode do not change. It gets hooks that count
    forwards, and one that stops a forward that only encodes.

    ``media`` bounds what pictures and clips may cost (`MediaLimits`). Weights that change later are noticed
    (`refresh`). Hooks that change what the model computes make what it stores private to this process, unless
    ``variant`` names the model with them (docs/limits.md).

    ``engine`` is what windows, sessions and the store run it by (`kamera.engines.Engine`). Safe to use from
    several threads.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any | None = None,
        variant: str = "",
        *,
        media: MediaLimits | None = None,
    ) -> None:
        self.engine = HfEngine(model, processor, variant)
        self.engine.builder.limits = media or self.engine.builder.limits

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        by_files: bool = False,
        media: MediaLimits | None = None,
        variant: str = "",
        **options: Any,
    ) -> Backbone:
        """Load a model directory or hub name with its processor.

        ``testbed`` is the one that Kamera ships, ``smollm2`` SmolLM2-135M-Instruct, ``screen-reader`` that
        behind a tower, tuned to answer questions about screens (docs/limits.md).

        ``device`` moves the whole model; ``dtype`` is one of torch's, by its name or a short one ("bf16"), or
        "auto"; ``device_map`` and every other option goes to ``from_pretrained`` of transformers. With
        ``by_files`` its fingerprint is `checkpoint_fingerprint` of its files. Then it shares an archive with
        another engine that was started on the same files (vLLM), but not with a `Backbone` without this
        option. ``variant`` is that of the class, and not given to transformers. Raises UnsupportedBackbone
        when no class loads it, ValueError for a device or dtype that cannot be used.
        """
        place, dtype = None if device is None else device_of(device), dtype_of(dtype)
        files = files_behind(name, options) if by_files else None
        model = load_model(name, dtype=dtype, **options)
        if place is not None:
            model = model.to(place)
        backbone = cls(model, load_processor(name), variant, media=media)
        of_files = fingerprint_of(files, backbone.engine.facts.dtype)
        if of_files is not None:
            backbone.engine.name(of_files)
        return backbone

    def __repr__(self) -> str:
        facts = self.engine.facts
        return f"Backbone({facts.kind}, {facts.family}, {len(self.engine.layout)} layers)"

    # -- facts ---------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.engine.model

    @property
    def processor(self) -> Any:
        """The model's processor, or its tokenizer; None without one."""
        return self.engine.processor

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides a chunk's KV. Raises ModelChanged for a model that was written to."""
        return self.engine.checked_fingerprint()

    def refresh(self) -> str:
        """The fingerprint made anew, of the model as it is now: after a change of its weights or adapters.

        Windows made before refuse, unless it is what it was. Raises ModelChanged if the rotary angles are
        others than this Backbone read: make a new one.
        """
        self.engine.refresh()
        return self.engine.fingerprint

    @property
    def no_reuse(self) -> str:
        """Why no KV of the model can be used again; "" if it can."""
        return self.engine.facts.no_reuse

    def describe(self) -> Description:
        """Family, layers, rotary facts, fingerprint, limits."""
        return describe(self.engine)

    def measure(self) -> AbstractContextManager[Work]:
        """Count decoder forwards, their tokens and vision encodes of this thread inside the block."""
        return self.engine.measure()

    # -- content -------------------------------------------------------------------------------

    def chunk(self, content: Content) -> Chunk:
        """Build a chunk from a chat content list, an image, frames, a video or image path, or text.

        A string that is a picture's or video's path, or looks like one, is opened or refused, never taken for
        text; text items (``{"type": "text", "text": …}``) and messages are text whatever they spell.
        A list of pictures is a clip; on a processor without a video processor its frames become
        pictures one after another. Raises UnreadableMedia, EmptyChunk, ModalityNotSupported or
        ProcessorRequired.
        """
        return self.engine.chunk(content)

    def chunk_from_tensors(
        self, input_ids: Any, *, label: str = "", picture: Any = None, **vision_inputs: Any
    ) -> Chunk:
        """Build a chunk from token ids and the model's own inputs (pixel_values, image_grid_thw, …).

        An ``attention_mask`` drops pads at either end. ``picture`` (of Pillow) is only for display, as
        `Chunk.picture`. Raises IncompatibleChunk for what is no content (inputs_embeds, position_ids, …) or
        does not belong together.
        """
        return self.engine.chunk_from_tensors(input_ids, label=label, picture=picture, **vision_inputs)

    def tokenize(self, text: str, *, special: bool = False) -> torch.Tensor:
        """Token ids of trusted ``text``, int64 ``[tokens]``."""
        return self.engine.builder.tokenize(text, special=special)


def describe(model: HfEngine) -> Description:
    """Family, layers, rotary facts, fingerprint, limits."""
    phased_channels = [c for spec in model.layout for c in spec.channels if c.rope is not None]
    rope = phased_channels[0].rope
    assert rope is not None
    axis_names = "thw" if model.axes == 3 else "p"
    order = "".join(axis_names[a] for a in rope.axes)
    return Description(
        model_class=model.facts.kind,
        model_type=str(getattr(model.model.config, "model_type", "")),
        family=model.facts.family,
        layers=len(model.layout),
        kv_layers=sum(bool(spec.channels) for spec in model.layout),
        channels=tuple(
            f"{c.name}[{c.heads}x{c.dim}]"
            + (f" phased {c.rotary_start}:{c.rotary_start + c.rope.rotary_dim}" if c.rope else "")
            for c in next(spec for spec in model.layout if spec.channels).channels
        ),
        bytes_per_token=model.facts.bytes_per_token,
        dtype=model.facts.dtype,
        devices=tuple(sorted({str(d) for d in model.devices if d is not None})),
        attention=str(getattr(model.model.config, "_attn_implementation", "")),
        position_axes=model.axes,
        rotary_dim=rope.rotary_dim,
        pairing=rope.pairing,
        axis_order=order,
        attention_scaling=rope.attention_scaling,
        position_limit=model.limits.below,
        limit_reason=model.limits.reason,
        takes_pixels=model.builder.takes_pixels,
        serial_decode=model.steps.why_serial,
        fingerprint=model.fingerprint,
        variant=model.variant,
    )
