"""Read family, layout and rotary facts off the live model: probed, never assumed from a config."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from kamera.engines.base import PositionLimits
from kamera.engines.hf import cache as model_cache
from kamera.errors import UnsupportedBackbone, quote
from kamera.ops import (
    LayerLayout,
    RopeSpec,
    attention_layout,
    mla_expanded_layout,
    mla_latent_layout,
)

_LIMITED = {
    "dynamic": "dynamic NTK scaling changes the frequencies of every key with the length past it",
    "longrope": "longrope switches to its long frequencies there, and older keys stay short",
}
_BUCKETS = "queries are scaled by position bucket, so what a chunk absorbs depends on its place"
"""Why positions are limited, by the type of rotary scaling, and where queries are scaled."""


def text_config(model: nn.Module) -> Any:
    """The decoder's config."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def find_decoder(model: nn.Module) -> nn.Module:
    """The decoder stack: the module that owns the layers, the embedding and the rotary module."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("layers", "rotary_emb", "embed_tokens")):
            return module
    raise UnsupportedBackbone(
        f"{type(model).__name__} has no decoder stack with a rotary module (rotary_emb): Kamera "
        "relocates rotary positions only; use a RoPE model"
    )


def has_experts(decoder: nn.Module) -> bool:
    """True if a part of the decoder routes tokens to experts."""
    return any("expert" in name.lower() for name, _ in decoder.named_modules())


def find_vision_towers(model: nn.Module) -> list[nn.Module]:
    """The modules that encode pixels, as the model's classes name them."""
    names = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens")
    towers: list[nn.Module] = []
    for path, module in model.named_modules():
        is_nested = any(module in set(t.modules()) for t in towers)
        if path.split(".")[-1] in names and not is_nested:
            towers.append(module)
    return towers


def state_of(model: nn.Module) -> tuple[list[Any], list[int]]:
    """The objects in every module, and how often each of its tensors was written.

    Hooks are left out: transformers adds its own, once, and they depend on the thread they run in.
    """
    objects: list[Any] = []
    for module in model.modules():
        objects += [value for name, value in vars(module).items() if "hooks" not in name]
        for part in (module._parameters, module._buffers, module._modules):
            objects += part.values()
    tensors = (t for t in objects if isinstance(t, torch.Tensor) and not t.is_inference())
    return objects, [t._version for t in tensors]


def is_same_state(one: tuple[list[Any], list[int]], other: tuple[list[Any], list[int]]) -> bool:
    """True if nothing was replaced, added, removed or written between two states."""
    is_kept = len(one[0]) == len(other[0]) and all(map(is_, one[0], other[0]))
    return is_kept and one[1] == other[1]


def position_axes(decoder: nn.Module) -> int:
    """3 for M-RoPE (temporal, height, width), 1 otherwise."""
    rotary: Any = decoder.rotary_emb
    return 3 if hasattr(rotary, "mrope_section") else 1


def probe_rope(decoder: nn.Module, layer_type: str | None) -> RopeSpec:
    """Describe the rotary module by calling it with one-hot positions.

    Angles come from the module's own ``inv_freq`` buffer; the call only tells which buffer entry each
    pair uses, on which axis, in which pairing, and the scaling of cos and sin.
    """
    rotary: Any = decoder.rotary_emb
    axes = position_axes(decoder)
    buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    device = getattr(rotary, buffer).device
    extra = () if layer_type is None else (layer_type,)

    def angles(position: list[int]) -> tuple[torch.Tensor, float]:
        # a float32 probe gives float32 tables; the default dtype is another while some thread loads a model
        x = torch.zeros(1, 1, 1, device=device, dtype=torch.float32)
        ids = torch.tensor(position, device=device)
        ids = ids.view(axes, 1, 1) if axes == 3 else ids.view(1, 1)
        table = rotary(x, ids, *extra)
        if isinstance(table, tuple):
            cos, sin = (t.flatten().double().cpu() for t in table)
        else:  # complex table (DeepSeek-V2): one entry per interleaved pair
            pairs = torch.view_as_real(table).reshape(-1, 2).double().cpu()
            cos, sin = pairs[:, 0].repeat_interleave(2), pairs[:, 1].repeat_interleave(2)
        return torch.atan2(sin, cos), float(torch.hypot(cos, sin).mean())

    full, scaling = angles([1] * axes)
    half = len(full) // 2
    is_half = torch.equal(full[:half], full[half:])
    is_interleaved = torch.equal(full[0::2], full[1::2])
    if not (is_half or is_interleaved):
        raise UnsupportedBackbone(
            f"{type(rotary).__name__} pairs its features neither half-split nor interleaved"
        )
    interleaved = is_interleaved and not is_half

    def per_pair(table: torch.Tensor) -> torch.Tensor:
        return table[0::2] if interleaved else table[:half]

    pair_angles = per_pair(full)
    axis = torch.zeros(half, dtype=torch.long)
    for a in range(axes if axes > 1 else 0):
        one_hot = [0] * axes
        one_hot[a] = 1
        axis[per_pair(angles(one_hot)[0]).abs() > 0] = a
    # only now: a module that chooses its frequencies has chosen them for these positions
    own = getattr(rotary, buffer).detach().double().cpu().flatten()
    # the buffer's entry whose angle this pair shows: the table itself is rounded through cos and sin
    nearest = (pair_angles[:, None] - own[None]).abs().argmin(1)
    return RopeSpec(
        inv_freq=tuple(own[nearest].tolist()),
        axes=tuple(axis.tolist()),
        num_axes=axes,
        pairing="interleaved" if interleaved else "half",
        attention_scaling=round(scaling, 6),  # read through float32 cos and sin
    )


def probe_ropes(decoder: nn.Module, layers: int) -> list[RopeSpec]:
    """The phase of every layer; layer types with thetas of their own are probed separately."""
    rotary: Any = decoder.rotary_emb
    config: Any = decoder.config
    types: list[str] = list(getattr(config, "layer_types", None) or ())
    takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
    if not (takes_type and types and hasattr(rotary, f"{types[0]}_inv_freq")):
        return [probe_rope(decoder, None)] * layers
    rope_by_type = {t: probe_rope(decoder, t) for t in set(types)}
    return [rope_by_type[t] for t in types[:layers]]


def probe_layout(decoder: nn.Module, config: Any, cache: model_cache.ModelCache) -> list[LayerLayout]:
    """Name the channels of a cache the model has just written, by shape (never by version)."""
    shapes = model_cache.raw_shapes(cache)
    ropes = probe_ropes(decoder, max(len(shapes), config.num_hidden_layers))
    latent = getattr(config, "kv_lora_rank", None)
    rope_dim = getattr(config, "qk_rope_head_dim", None)
    layouts: list[LayerLayout] = []
    for i, sizes in enumerate(shapes):
        if not sizes:
            layouts.append(LayerLayout("NONE", ()))
            continue
        rope = ropes[i]
        keys, values = sizes["keys"], sizes["values"]
        if latent and keys[1] == 1 and keys[-1] == latent and values[-1] == rope_dim:
            indexer = None
            if "indexer_keys" in sizes:
                indexer = (1, sizes["indexer_keys"][-1], _indexer_rope(rope))
            layouts.append(mla_latent_layout(latent, rope, indexer))
        elif latent and rope_dim and keys[-1] > rope_dim:
            layouts.append(mla_expanded_layout(keys[1], keys[-1] - rope_dim, values[-1], rope))
        else:
            layouts.append(attention_layout(keys[1], config.num_attention_heads, keys[-1], values[-1], rope))
    layouts += [LayerLayout("NONE", ())] * (config.num_hidden_layers - len(layouts))
    equal = {one: one for one in layouts}
    return [equal[one] for one in layouts]  # equal layers are one object: each call of `serve` compares them


def _indexer_rope(rope: RopeSpec) -> RopeSpec:
    # DSA indexers turn the first features of their one head half-split, even if the main keys are not
    return RopeSpec(rope.inv_freq, rope.axes, rope.num_axes, "half", rope.attention_scaling)


def without_wrapper(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, its adapters in place. ValueError for any other."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Backbone takes a loaded model, not {quote(model)}: Backbone.from_pretrained loads one by name"
        )
    wrapper: Any = model
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(
            f"{type(model).__name__} is no transformers model: load one with Backbone.from_pretrained(name), "
            "or with its class of transformers"
        )
    adapters = getattr(wrapper, "peft_config", None)
    if not (isinstance(adapters, dict) and hasattr(wrapper, "get_base_model")):
        return model
    prompts = [name for name, a in adapters.items() if getattr(a, "is_prompt_learning", False)]
    if prompts:
        raise UnsupportedBackbone(
            f"adapters {prompts} learn a prompt in front of every input, which no chunk could be moved "
            "past: use an adapter that changes weights (LoRA, …)"
        )
    inner: nn.Module = wrapper.get_base_model()
    return inner


def check_processor(processor: Any) -> None:
    """Raise ValueError for a processor that is not one: its name, say."""
    if processor is not None and not callable(processor):
        raise ValueError(
            f"Backbone takes a loaded processor, not {quote(processor)}: AutoProcessor.from_pretrained "
            "loads one by name"
        )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UnsupportedBackbone for state that is no relocatable KV."""
    config: Any = model.config
    name = getattr(config, "model_type", type(model).__name__)
    text = text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedBackbone(
            f"{name} is an encoder-decoder: its decoder reads the encoder through cross-attention; "
            "use a decoder-only model"
        )
    cross_layers = getattr(text, "cross_attention_layers", None)
    if cross_layers:
        raise UnsupportedBackbone(
            f"{name} reads images through cross-attention (layers {list(cross_layers)}): image KV has no "
            "place in the sequence to move; use a model that puts image tokens into the sequence"
        )
    foreign = model_cache.foreign_layers(config)
    if foreign:
        kinds = sorted(set(foreign.values()))
        raise UnsupportedBackbone(
            f"{name} is a hybrid: {len(foreign)} of {text.num_hidden_layers} layers keep {kinds}, a "
            "running state that mixes all earlier tokens and cannot be cut out; use a model with "
            "attention in every layer"
        )
    types = set(getattr(text, "layer_types", None) or ())
    if "chunked_attention" in types:
        raise UnsupportedBackbone(
            f"{name} cuts attention into chunks at fixed absolute positions: a moved span would attend "
            "differently; use a model with full or sliding attention"
        )


def refuse_tensor_subclasses(model: nn.Module, kv: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedBackbone for KV in tensors of a class of their own, which no kernel can read."""
    kinds = sorted({type(tensor).__name__ for tensor in kv if type(tensor) is not torch.Tensor})
    if kinds:
        raise UnsupportedBackbone(
            f"{type(model).__name__} computes its KV as {', '.join(kinds)}, whose memory no kernel can read: "
            "load it with plain weights, or with quantised ones that compute plain tensors"
        )


def position_limits(model: nn.Module) -> PositionLimits:
    """The positions a model was trained on, and the first at which its rotary or query scaling changes."""
    text = text_config(model)
    parameters = getattr(text, "rope_parameters", None) or {}
    limits: list[tuple[int, str]] = []
    for p in [p for p in parameters.values() if isinstance(p, dict)] or [parameters]:
        original = p.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        reasons = [_LIMITED[kind] for kind in (p.get("rope_type"),) if kind in _LIMITED]
        reasons += [_BUCKETS] if p.get("llama_4_scaling_beta") else []
        limits += [(original or text.max_position_embeddings, reason) for reason in reasons]
    limit, reason = min(limits, key=itemgetter(0), default=(None, ""))
    return PositionLimits(getattr(text, "max_position_embeddings", None), limit, reason)
