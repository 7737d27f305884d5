"""Tiny randomly initialised models of every family Kamera serves, and of those it refuses.

One builder per family, registered by name. Hidden size 64, three or four layers: a model builds in
milliseconds and a forward costs less than its Python. Weights are scaled so that attention matters;
the libraries' own init (std 0.02) would hide errors.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4Config, Gemma4TextConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from kamera.engines.hf import HfEngine
from tests.models.unknown import UnknownConfig, UnknownForCausalLM

VOCABULARY, HIDDEN = 160, 64
IMAGE, VIDEO, VISION_START, VISION_END = 150, 151, 152, 153
"""Special token ids, the same in every family that has them."""

DEVICE = os.environ.get("KAMERA_TEST_DEVICE", "cpu")
"""Where the models of the tests are; inputs stay on the CPU, as a tokenizer and a processor make them."""

Builder = Callable[[], nn.Module]

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 4096,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": VISION_START,
    "image_end_token_id": VISION_END,
    "video_start_token_id": 154,
    "video_end_token_id": 155,
}
_MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_SIGLIP = {**_SMALL_VISION, "image_size": 16, "num_channels": 3}
_AUDIO = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": HIDDEN,
    "num_mel_bins": 8,
    "n_window": 4,
    "max_source_positions": 32,
}

_SUPPORTED: dict[str, Builder] = {}
_LIMITED: dict[str, Builder] = {}
_REFUSED: dict[str, Builder] = {}


def _register(table: dict[str, Builder]) -> Callable[[Builder], Builder]:
    def add(builder: Builder) -> Builder:
        table[builder.__name__] = builder
        return builder

    return add


supported = _register(_SUPPORTED)
limited = _register(_LIMITED)
refused = _register(_REFUSED)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A fresh model of the family ``name``, in eval mode; equal seeds give equal weights.

    ``dtype`` is applied as ``from_pretrained`` does: weights are cast, rotary buffers stay float32.
    """
    builder = {**_SUPPORTED, **_LIMITED, **_REFUSED}[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = builder().eval()
    randomise(model, seed + 1)
    if dtype != torch.float32:
        cast(model, dtype)
    return model.to(DEVICE)


@functools.cache
def backbone(name: str, dtype: torch.dtype = torch.float32) -> HfEngine:
    """The shared backbone of a family, built once per session: never write into its model."""
    return HfEngine(build(name, dtype))


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every weight anew, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                std = 1.0 if "embed_tokens" in name else 1.2 / math.sqrt(p.shape[-1])
                p.normal_(0, std, generator=generator)
            elif "norm" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
            elif name.endswith("bias"):
                p.normal_(0, 0.2, generator=generator)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """The model in another dtype, as it is loaded in it: its rotary frequencies stay."""
    kept = {n: b.clone() for n, b in model.named_buffers() if "inv_freq" in n}
    model.to(dtype)
    for name, buffer in kept.items():
        path, attribute = name.rsplit(".", 1)
        setattr(model.get_submodule(path), attribute, nn.Buffer(buffer, persistent=False))


def _mrope(sections: list[int], theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}


def _qwen2_text(**more: Any) -> dict[str, Any]:
    return {**_BASE, "rope_parameters": _mrope([2, 3, 3]), **more}


def _qwen3_text(**more: Any) -> dict[str, Any]:
    return {**_BASE, "head_dim": 16, "rope_parameters": _mrope([4, 2, 2]), **more}


def _qwen2_5_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [1],
        **more,
    }


def _qwen3_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 64,
        **more,
    }


def _v3_text(**more: Any) -> dict[str, Any]:
    return {**_BASE, "num_key_value_heads": 4, **_MLA, **_MOE, "num_nextn_predict_layers": 0, **more}


def _llama(**more: Any) -> dict[str, Any]:
    return {"model_type": "llama", **_BASE, **more}


def _alternating(layers: int) -> list[str]:
    return (["sliding_attention", "full_attention"] * layers)[:layers]


# -- M-RoPE --------------------------------------------------------------------------------------


@supported
def qwen2_vl() -> nn.Module:
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": HIDDEN,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = transformers.Qwen2VLConfig(text_config=_qwen2_text(), vision_config=vision, **_TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


@supported
def qwen2_5_vl() -> nn.Module:
    config = transformers.Qwen2_5_VLConfig(
        text_config=_qwen2_text(), vision_config=_qwen2_5_vision(tokens_per_second=2), **_TOKENS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


@supported
def qwen2_5_omni() -> nn.Module:
    config = Qwen2_5OmniThinkerConfig(
        text_config=_qwen2_text(),
        vision_config=_qwen2_5_vision(),
        audio_config=_AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_index=154,
        audio_start_token_id=155,
        audio_end_token_id=156,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


@supported
def qwen3_vl() -> nn.Module:
    config = transformers.Qwen3VLConfig(
        text_config=_qwen3_text(),
        vision_config=_qwen3_vision(deepstack_visual_indexes=[0, 1]),
        **_TOKENS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


@supported
def qwen3_vl_moe() -> nn.Module:
    config = transformers.Qwen3VLMoeConfig(
        text_config=_qwen3_text(**_QWEN_MOE),
        vision_config=_qwen3_vision(deepstack_visual_indexes=[0, 1]),
        **_TOKENS,
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


@supported
def qwen3_omni() -> nn.Module:
    config = Qwen3OmniMoeThinkerConfig(
        text_config=_qwen3_text(**_QWEN_MOE),
        vision_config=_qwen3_vision(deepstack_visual_indexes=[0, 1]),
        audio_config={**_AUDIO, "downsample_hidden_size": 8},
        audio_token_id=154,
        audio_start_token_id=155,
        **_TOKENS,
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


def _glm_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 48,
        **more,
    }


_GLM_ROPE = _mrope([1, 1, 2], 1e4, partial_rotary_factor=0.5)


@supported
def glm4v() -> nn.Module:
    config = transformers.Glm4vConfig(
        text_config={**_BASE, "rope_parameters": dict(_GLM_ROPE)},
        vision_config=_glm_vision(),
        **_GLM_TOKENS,
    )
    return transformers.Glm4vForConditionalGeneration(config)


@supported
def glm46v() -> nn.Module:
    config = transformers.Glm46VConfig(
        text_config={"model_type": "glm4v_text", **_BASE, "rope_parameters": dict(_GLM_ROPE)},
        vision_config=_glm_vision(model_type="glm4v_vision"),
        **_GLM_TOKENS,
    )
    return transformers.Glm46VForConditionalGeneration(config)


@supported
def paddleocr_vl() -> nn.Module:
    config = transformers.PaddleOCRVLConfig(
        text_config={**_BASE, "head_dim": 16, "rope_parameters": _mrope([2, 3, 3], 5e5)},
        vision_config={**_SMALL_VISION, "image_size": 16},
        **_TOKENS,
    )
    return transformers.PaddleOCRVLForConditionalGeneration(config)


@supported
def ernie() -> nn.Module:
    text = {
        **_BASE,
        "rope_parameters": _mrope([3, 3, 2], 5e5),
        "moe_intermediate_size": [32, 32],
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48}
    config = transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision, **_GLM_TOKENS)
    return transformers.Ernie4_5_VLMoeForConditionalGeneration(config)


# -- one position axis, MLA ----------------------------------------------------------------------


@supported
def kimi_k25() -> nn.Module:
    vision = {
        **_SMALL_VISION,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "pos_emb_time": 4,
    }
    config = transformers.Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **_v3_text()},
        vision_config=vision,
        projection_hidden_size=32,
        tie_word_embeddings=False,
        **_TOKENS,
    )
    return transformers.Kimi_K25ForConditionalGeneration(config)


@supported
def deepseek_v2() -> nn.Module:
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**_v3_text(topk_method="greedy")))


@supported
def deepseek_v3() -> nn.Module:
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**_v3_text()))


@supported
def deepseek_v3_noint() -> nn.Module:
    config = transformers.DeepseekV3Config(**_v3_text(rope_interleave=False))
    return transformers.DeepseekV3ForCausalLM(config)


@supported
def deepseek_v3_yarn() -> nn.Module:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    config = transformers.DeepseekV3Config(**_v3_text(rope_parameters=yarn))
    return transformers.DeepseekV3ForCausalLM(config)


@supported
def deepseek_v32() -> nn.Module:
    text = _v3_text(head_dim=8, index_topk=6, index_head_dim=16, index_n_heads=2)
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**text))


@supported
def minicpm3() -> nn.Module:
    text = {
        **_BASE,
        **_MLA,
        "num_key_value_heads": 4,
        "scale_emb": 1,
        "dim_model_base": HIDDEN,
        "head_dim": 8,
    }
    return transformers.MiniCPM3ForCausalLM(transformers.MiniCPM3Config(**text))


# -- one position axis, attention ----------------------------------------------------------------


@supported
def deepseek_vl() -> nn.Module:
    config = transformers.DeepseekVLConfig(
        text_config=_llama(num_key_value_heads=4),
        vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
        image_token_id=IMAGE,
    )
    return transformers.DeepseekVLForConditionalGeneration(config)


def _llava(**text: Any) -> nn.Module:
    config = transformers.LlavaConfig(
        text_config=_llama(**text),
        vision_config={"model_type": "clip_vision_model", **_SIGLIP},
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return transformers.LlavaForConditionalGeneration(config)


@supported
def llava() -> nn.Module:
    return _llava()


@supported
def llava_llama3() -> nn.Module:
    return _llava(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    )


@supported
def llava_yarn() -> nn.Module:
    """YaRN with an attention scaling that is not 1."""
    return _llava(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        }
    )


@supported
def llava_onevision() -> nn.Module:
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_BASE},
        vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[16, 16]],
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


@supported
def smolvlm() -> nn.Module:
    config = transformers.SmolVLMConfig(text_config=_llama(), vision_config=_SIGLIP, image_token_id=IMAGE)
    return transformers.SmolVLMForConditionalGeneration(config)


@supported
def idefics3() -> nn.Module:
    config = transformers.Idefics3Config(text_config=_llama(), vision_config=_SIGLIP, image_token_id=IMAGE)
    return transformers.Idefics3ForConditionalGeneration(config)


@supported
def internvl() -> nn.Module:
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_BASE},
        vision_config={**_SMALL_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    return transformers.InternVLForConditionalGeneration(config)


@supported
def video_llama_3() -> nn.Module:
    config = transformers.VideoLlama3Config(
        text_config={"model_type": "qwen2", **_BASE},
        vision_config=_SMALL_VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.VideoLlama3ForConditionalGeneration(config)


@supported
def mistral3() -> nn.Module:
    return _mistral3("mistral", sliding_window=None)


def _mistral3(text_type: str, **text: Any) -> nn.Module:
    config = transformers.Mistral3Config(
        text_config={"model_type": text_type, **_BASE, "head_dim": 16, **text},
        vision_config={
            "model_type": "pixtral",
            **_SMALL_VISION,
            "image_size": 16,
            "head_dim": 16,
        },
        image_token_index=IMAGE,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


@supported
def gemma3() -> nn.Module:
    """Bidirectional image blocks, and sliding layers whose window is shorter than a chunk."""
    text = {
        **_BASE,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": _alternating(4),
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={"model_type": "siglip_vision_model", **_SIGLIP},
        image_token_id=IMAGE,
        mm_tokens_per_image=4,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4_text(**more: Any) -> dict[str, Any]:
    return {
        **_BASE,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "layer_types": _alternating(4),
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        **more,
    }


@supported
def gemma4() -> nn.Module:
    """Two head dims, two thetas, a zero tail of frequencies."""
    return transformers.Gemma4ForCausalLM(Gemma4TextConfig(**_gemma4_text()))


@supported
def gemma4_shared() -> nn.Module:
    """The last two layers read the KV of the first two, and every layer has inputs of its own."""
    text = _gemma4_text(num_kv_shared_layers=2, hidden_size_per_layer_input=8)
    return transformers.Gemma4ForCausalLM(Gemma4TextConfig(**text))


@supported
def gemma4_vl() -> nn.Module:
    """Bidirectional picture blocks named by ``mm_token_type_ids``, inputs per layer, shared KV."""
    vision = {**_SMALL_VISION, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2}
    config = Gemma4Config(
        text_config=_gemma4_text(
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            use_bidirectional_attention="vision",
        ),
        vision_config={**vision, "position_embedding_size": 16},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
        audio_token_id=154,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


@supported
def mistral_sliding() -> nn.Module:
    """Every layer slides, over a window shorter than a chunk."""
    config = transformers.MistralConfig(**{**_BASE, "head_dim": 16, "sliding_window": 8})
    return transformers.MistralForCausalLM(config)


@supported
def llama_mqa() -> nn.Module:
    """One KV head."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_BASE, "num_key_value_heads": 1}))


@supported
def unknown() -> nn.Module:
    """A model no library knows, with a rotary class of its own."""
    return UnknownForCausalLM(UnknownConfig())


# -- relocatable below a position ----------------------------------------------------------------

LIMIT = 256
"""Where the limited families change how they turn keys or scale queries."""


@limited
def dynamic_ntk() -> nn.Module:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.LlamaConfig(**{**_BASE, "max_position_embeddings": LIMIT, "rope_parameters": rope})
    return transformers.LlamaForCausalLM(config)


@limited
def longrope() -> nn.Module:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": LIMIT,
        "factor": 16.0,
    }
    config = transformers.Phi3Config(
        **{
            **_BASE,
            "rope_parameters": rope,
            "original_max_position_embeddings": LIMIT,
            "sliding_window": None,
        }
    )
    return transformers.Phi3ForCausalLM(config)


# configs write into the dict they are given: hand each a copy
_BUCKETS = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": LIMIT,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}


@limited
def ministral3() -> nn.Module:
    return _mistral3("ministral3", sliding_window=None, rope_parameters=dict(_BUCKETS))


@limited
def mistral4() -> nn.Module:
    text = {
        **_BASE,
        **_MLA,
        **_MOE,
        "num_key_value_heads": 4,
        "rope_interleave": True,
        "rope_parameters": dict(_BUCKETS),
    }
    return transformers.Mistral4ForCausalLM(transformers.Mistral4Config(**text))


# -- refused -------------------------------------------------------------------------------------


@refused
def qwen3_5() -> nn.Module:
    text = {
        **_BASE,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": _mrope([2, 1, 1], partial_rotary_factor=0.25),
    }
    config = transformers.Qwen3_5Config(text_config=text, vision_config=_qwen3_vision(), **_TOKENS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


@refused
def mllama() -> nn.Module:
    text = {
        **_BASE,
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "intermediate_layers_indices": [0],
        "vision_output_dim": 64,
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return transformers.MllamaForConditionalGeneration(config)


@refused
def llama4() -> nn.Module:
    config = transformers.Llama4TextConfig(
        **{
            **_BASE,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        }
    )
    return transformers.Llama4ForCausalLM(config)


@refused
def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


@refused
def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=2, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config)


@refused
def unknown_absolute() -> nn.Module:
    """Learned absolute positions are added before the layers."""
    return UnknownForCausalLM(UnknownConfig(absolute=True))


@refused
def unknown_decaying_values() -> nn.Module:
    """Values are scaled by their position."""
    return UnknownForCausalLM(UnknownConfig(decaying_values=True))


@refused
def unknown_other_rotation() -> nn.Module:
    """The layers turn keys by other angles than the rotary module shows."""
    return UnknownForCausalLM(UnknownConfig(angle_scale=1.01))


FAMILIES = tuple(_SUPPORTED)
"""Families Kamera serves at every position."""

LIMITED = tuple(_LIMITED)
"""Families Kamera serves below a position."""

REFUSED = tuple(_REFUSED)
"""Families Kamera refuses."""

KINDS = (
    *("qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "glm4v", "kimi_k25", "deepseek_v32", "deepseek_vl"),
    *("llava_onevision", "idefics3", "gemma3", "gemma4_shared", "mistral_sliding", "llama_mqa"),
    *("unknown", "dynamic_ntk", "longrope"),
)
"""A family of each kind of attention, of state, of positions and of encoding."""


def of_each_kind(families: Iterable[str]) -> list[Any]:
    """Parameters of a test: `KINDS` among ``families``; the others run with ``-m slow``."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in families]


MROPE = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_omni",
    "glm4v",
    "glm46v",
    "paddleocr_vl",
    "ernie",
)
"""Families with three position axes."""
