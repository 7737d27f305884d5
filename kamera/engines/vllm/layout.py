"""The layout of a model's KV in stores, out of vLLM's configuration: no tensor, no module.

Stores hold KV as transformers caches it (`kamera.ops.layout`). vLLM pairs the rotary features of MLA
otherwise; `pages` converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kamera.errors import UnsupportedBackbone
from kamera.ops import Layout, RopeSpec, attention_layout, mla_latent_layout

_PLAIN = ("default", "mrope")
_ATTENTION = (
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
)
"""Text models whose keys both engines turn in halves."""
_LATENT: dict[str, Literal["half", "interleaved"]] = {
    "deepseek_v2": "interleaved",
    "deepseek_v3": "half",
    "kimi_k2": "half",
}
"""Text models with latents, and the pairing of their rotary keys in stores; in pages they are interleaved."""


@dataclass(frozen=True)
class EngineLayout:
    """All layers as stores hold them, and ``paired``: the pages hold k_pe in pairs where stores hold halves.

    ``axes`` is the number of position axes.
    """

    layers: Layout
    axes: int
    mla: bool
    paired: bool = False


def layout_of(text: Any) -> EngineLayout:
    """The layout of a text configuration of transformers, as vLLM runs it.

    Raises UnsupportedBackbone for a model whose pages nobody has compared with what stores hold, for rotary
    positions other than plain ones, and for layers that are not alike.
    """
    kind = str(getattr(text, "model_type", "?"))
    ropes: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    scaling = str(ropes.get("rope_type", "default"))
    mla = bool(getattr(text, "kv_lora_rank", None))
    if kind not in (_LATENT if mla else _ATTENTION):
        raise UnsupportedBackbone(f"{kind}: the connector knows {', '.join((*_ATTENTION, *_LATENT))}")
    if scaling not in _PLAIN:
        raise UnsupportedBackbone(
            f"rotary positions of type {scaling!r} in {kind}: the connector turns plain ones"
        )
    if set(getattr(text, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UnsupportedBackbone(f"{kind} has layers other than full attention: the connector serves none")
    layers, theta = int(text.num_hidden_layers), float(ropes.get("rope_theta", 10000.0))
    if mla:
        rotary_dim, pairing = int(text.qk_rope_head_dim), _LATENT[kind]
        rope = RopeSpec(_frequencies(theta, rotary_dim), (0,) * (rotary_dim // 2), 1, pairing)
        latent = mla_latent_layout(int(text.kv_lora_rank), rope)
        return EngineLayout((latent,) * layers, 1, True, pairing == "half")
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    rotary_dim = int(width * float(ropes.get("partial_rotary_factor", 1.0)))
    sections = list(ropes.get("mrope_section", ()))
    axes = _axes(sections, rotary_dim // 2, bool(ropes.get("mrope_interleaved", False)))
    rope = RopeSpec(_frequencies(theta, rotary_dim), axes, 3 if sections else 1, "half")
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    layer = attention_layout(heads, int(text.num_attention_heads), width, width, rope)
    return EngineLayout((layer,) * layers, rope.num_axes, False)


def _frequencies(theta: float, width: int) -> tuple[float, ...]:
    """As both engines compute them: float32."""
    return tuple((1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float) / width))).tolist())


def _axes(sections: list[int], pairs: int, interleaved: bool) -> tuple[int, ...]:
    """The position axis of each rotary pair: one after another, or t, h, w in turn."""
    if not sections:
        return (0,) * pairs
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, 3 * sections[axis], 3):
            axes[pair] = axis
    return tuple(axes)
