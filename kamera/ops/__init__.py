"""Tensors in, tensors out: the algebra of position-free KV. Imports nothing else of the package."""

from kamera.ops.kv import KV, LayerKV, kv_bytes, kv_concat, kv_map, kv_slice, kv_tokens
from kamera.ops.layout import (
    Channel,
    LayerLayout,
    Layout,
    attention_layout,
    check_kv,
    mla_expanded_layout,
    mla_latent_layout,
    relocate_kv,
    rotated_bytes,
)
from kamera.ops.merge import AttentionState, merge_states
from kamera.ops.patch import (
    Formed,
    LowRank,
    Patch,
    apply_patch,
    deficit,
    factor,
    form_patch,
    mean_deficit,
    patch_of,
    turn_factors,
)
from kamera.ops.rope import RopeSpec, relocate, uniform_offset

__all__ = [
    "KV",
    "AttentionState",
    "Channel",
    "Formed",
    "LayerKV",
    "LayerLayout",
    "Layout",
    "LowRank",
    "Patch",
    "RopeSpec",
    "apply_patch",
    "attention_layout",
    "check_kv",
    "deficit",
    "factor",
    "form_patch",
    "kv_bytes",
    "kv_concat",
    "kv_map",
    "kv_slice",
    "kv_tokens",
    "mean_deficit",
    "merge_states",
    "mla_expanded_layout",
    "mla_latent_layout",
    "patch_of",
    "relocate",
    "relocate_kv",
    "rotated_bytes",
    "turn_factors",
    "uniform_offset",
]
