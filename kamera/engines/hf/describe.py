"""Facts read off a live model, for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kamera.engines.hf.backbone import Backbone


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


def describe(backbone: Backbone, like: torch.Tensor, devices: Sequence[torch.device | None]) -> Description:
    """Family, layers, rotary facts, fingerprint, limits; KV like ``like``, each layer's on its device."""
    phased = [c for spec in backbone.layout for c in spec.channels if c.rope is not None]
    rope = phased[0].rope
    assert rope is not None
    axis_names = "thw" if backbone.axes == 3 else "p"
    order = "".join(axis_names[a] for a in rope.axes)
    return Description(
        model_class=type(backbone.model).__name__,
        model_type=str(getattr(backbone.model.config, "model_type", "")),
        family=backbone.family,
        layers=len(backbone.layout),
        kv_layers=sum(bool(spec.channels) for spec in backbone.layout),
        channels=tuple(
            f"{c.name}[{c.heads}x{c.dim}]"
            + (f" phased {c.rotary_start}:{c.rotary_start + c.rope.rotary_dim}" if c.rope else "")
            for c in next(spec for spec in backbone.layout if spec.channels).channels
        ),
        bytes_per_token=backbone.bytes_per_token,
        dtype=str(like.dtype).removeprefix("torch."),
        devices=tuple(sorted({str(d) for d in devices if d is not None})),
        attention=str(getattr(backbone.model.config, "_attn_implementation", "")),
        position_axes=backbone.axes,
        rotary_dim=rope.rotary_dim,
        pairing=rope.pairing,
        axis_order=order,
        attention_scaling=rope.attention_scaling,
        position_limit=None if backbone.limits.below is None else backbone.limits.below,
        limit_reason="" if backbone.limits.below is None else backbone.limits.reason,
        takes_pixels=backbone.builder.takes_pixels,
        serial_decode=backbone.serial_decode,
        fingerprint=backbone.fingerprint,
    )
