"""The algebra of position-free KV: tensors in, tensors out. It imports only `kamera.errors`."""

from kamera.ops.allocate import allocate, total_gain
from kamera.ops.budget import PatchBudget, Sized, layers_of
from kamera.ops.compose import Composed, compose, terms_of, triples_of
from kamera.ops.compress import compress
from kamera.ops.digest import chunk_id, digest, tensor_bytes, tensor_digest
from kamera.ops.factoring import factor, kept_energy
from kamera.ops.finite import check_encoding, check_finite
from kamera.ops.guarantee import (
    GUARANTEES,
    Guarantee,
    at_least,
    guarantee_named,
    outranks,
    prefilled_behind,
    weakest,
)
from kamera.ops.kv import KV, LayerKV, kv_bytes, kv_concat, kv_distance, kv_map, kv_slice, kv_tokens
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
from kamera.ops.lists import flat_lists, name_order, whole_lists
from kamera.ops.lowrank import Deltas, Factor, FactorSize, Formed, LowRank, Patch, floats, patch_bytes
from kamera.ops.patch import (
    apply_patch,
    deficit,
    form_patch,
    mean_deficit,
    patch_of,
    turn_factors,
)
from kamera.ops.proof import Proof, compared, kv_error
from kamera.ops.quantize import Bits, Codes, Quantized, quantize
from kamera.ops.quantize_kv import (
    GRIDS,
    KV_CODECS,
    CodedChannel,
    CodedKV,
    Grid,
    KVCodec,
    Loss,
    code_kv,
    kv_tensors,
)
from kamera.ops.readers import Metric, Readers
from kamera.ops.rope import RopeSpec, relocate, uniform_offset
from kamera.ops.sketch import sketch

__all__ = [
    "GRIDS",
    "GUARANTEES",
    "KV",
    "KV_CODECS",
    "Bits",
    "Channel",
    "CodedChannel",
    "CodedKV",
    "Codes",
    "Composed",
    "Deltas",
    "Factor",
    "FactorSize",
    "Formed",
    "Grid",
    "Guarantee",
    "KVCodec",
    "LayerKV",
    "LayerLayout",
    "Layout",
    "Loss",
    "LowRank",
    "Metric",
    "Patch",
    "PatchBudget",
    "Proof",
    "Quantized",
    "Readers",
    "RopeSpec",
    "Sized",
    "allocate",
    "apply_patch",
    "at_least",
    "attention_layout",
    "check_encoding",
    "check_finite",
    "check_kv",
    "chunk_id",
    "code_kv",
    "compared",
    "compose",
    "compress",
    "deficit",
    "digest",
    "factor",
    "flat_lists",
    "floats",
    "form_patch",
    "guarantee_named",
    "kept_energy",
    "kv_bytes",
    "kv_concat",
    "kv_distance",
    "kv_error",
    "kv_map",
    "kv_slice",
    "kv_tensors",
    "kv_tokens",
    "layers_of",
    "mean_deficit",
    "mla_expanded_layout",
    "mla_latent_layout",
    "name_order",
    "outranks",
    "patch_bytes",
    "patch_of",
    "prefilled_behind",
    "quantize",
    "relocate",
    "relocate_kv",
    "rotated_bytes",
    "sketch",
    "tensor_bytes",
    "tensor_digest",
    "terms_of",
    "total_gain",
    "triples_of",
    "turn_factors",
    "uniform_offset",
    "weakest",
    "whole_lists",
]
