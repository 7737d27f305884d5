"""Facts read off a live model, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.engines.hf.engine import HfEngine


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


def describe(model: HfEngine) -> Description:
    """Family, layers, rotary facts, fingerprint, limits."""
    phased = [c for spec in model.layout for c in spec.channels if c.rope is not None]
    rope = phased[0].rope
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
        serial_decode=model.steps.serial,
        fingerprint=model.fingerprint,
    )
