"""Published models as shapes: real classes, nothing downloaded.

What an edit or a prefill costs is decided by shapes, not by what the weights know; so every size below
is the published one and every weight is noise (`lab.speed.shape`). Numbers are those of each
checkpoint's own config.json (and, for the two Qwen2.5-VL, table 1 of arXiv:2502.13923; for Kimi-VL,
arXiv:2504.07491).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.speed.shape import FIRST_WORD, IMAGE, VIDEO, VISION_END, VISION_START, Preset

__all__ = ["FIRST_WORD", "PRESETS", "TINY", "Preset", "preset"]

_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _mrope(sections: list[int], theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections}


def _qwen2_5(name: str, checkpoint: str, text: Mapping[str, Any]) -> Preset:
    return Preset(
        name=name,
        checkpoint=checkpoint,
        stands_for="the published shape",
        model="Qwen2_5_VL",
        pictures="patches",
        depth="depth",
        taps=("fullatt_block_indexes",),
        config={
            **_TOKENS,
            "text_config": {
                **_ENDS,
                "max_position_embeddings": 128000,
                "rms_norm_eps": 1e-6,
                "rope_parameters": _mrope([16, 24, 24], 1e6),
                **text,
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "window_size": 112,
                "tokens_per_second": 2,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "out_hidden_size": text["hidden_size"],
            },
        },
    )


QWEN2_5_VL_3B = _qwen2_5(
    "qwen2.5-vl-3b",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
)
QWEN2_5_VL_7B = _qwen2_5(
    "qwen2.5-vl-7b",
    "Qwen/Qwen2.5-VL-7B-Instruct",
    {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
)
QWEN3_VL_8B = Preset(
    name="qwen3-vl-8b",
    checkpoint="Qwen/Qwen3-VL-8B-Instruct",
    stands_for="the published shape",
    model="Qwen3VL",
    pictures="patches",
    depth="depth",
    taps=("deepstack_visual_indexes",),
    config={
        **_TOKENS,
        "text_config": {
            **_ENDS,
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _mrope([24, 20, 20], 5e6),
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "out_hidden_size": 4096,
        },
    },
)
KIMI_VL_A3B = Preset(
    name="kimi-vl-a3b",
    checkpoint="moonshotai/Kimi-VL-A3B-Instruct",
    stands_for="its decoder (DeepSeek-V3 blocks: MLA, experts) behind the tower of Kimi-K2.5, which "
    "transformers has and which is MoonViT of the same size with a time axis",
    model="Kimi_K25",
    pictures="grid",
    depth="num_hidden_layers",
    config={
        **_TOKENS,
        "projection_hidden_size": 1152,
        "text_config": {
            **_ENDS,
            "model_type": "deepseek_v3",
            "vocab_size": 163840,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8e5},
        },
        "vision_config": {
            "patch_size": 14,
            "pos_emb_height": 64,
            "pos_emb_width": 64,
            "pos_emb_time": 4,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "merge_kernel_size": [2, 2],
        },
    },
)
LLAVA_1_5_7B = Preset(
    name="llava-1.5-7b",
    checkpoint="llava-hf/llava-1.5-7b-hf",
    stands_for="the published shape, positions to 8192 (the checkpoint's 4096 leave no room for a context "
    "in front of a chunk of 4096 tokens)",
    model="Llava",
    pictures="square",
    depth="num_hidden_layers",
    config={
        "image_token_index": IMAGE,
        "image_seq_length": 576,
        "text_config": {
            **_ENDS,
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "projection_dim": 768,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
    },
)
TINY = Preset(
    name="tiny",
    checkpoint="none",
    stands_for="Qwen2.5-VL at a size for tests",
    model="Qwen2_5_VL",
    pictures="patches",
    depth="depth",
    taps=("fullatt_block_indexes",),
    config={
        **_TOKENS,
        "text_config": {
            **_ENDS,
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": _mrope([2, 3, 3], 1e6),
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
    },
)

PRESETS: Mapping[str, Preset] = {
    p.name: p for p in (QWEN2_5_VL_3B, QWEN2_5_VL_7B, QWEN3_VL_8B, KIMI_VL_A3B, LLAVA_1_5_7B, TINY)
}


def preset(name: str) -> Preset:
    """The preset called ``name``; ValueError, with the names there are, for another."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is none of {', '.join(PRESETS)}")
    return PRESETS[name]
