"""Deepstack GQA: Qwen3-VL, whose vision features enter three times."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen3VLConfig
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from kamera.content.without_video import image_only

from .family import HEAD_DIM, HIDDEN, PATCH, Family, qwen_pixels, text_config
from .gqa import qwen_pictures, token_ids


def _config(tokenizer: PreTrainedTokenizerBase) -> Any:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": 3,
        "deepstack_visual_indexes": [0, 1],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 32 * 32,
        "initializer_range": 0.05,
    }
    return Qwen3VLConfig(
        text_config=text_config(tokenizer, num_key_value_heads=2, head_dim=HEAD_DIM, rope_parameters=rope),
        vision_config=vision,
        tie_word_embeddings=True,
        dtype="float32",
        **token_ids(tokenizer),
    )


def _processor(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    return image_only(Qwen3VLProcessor)(qwen_pictures(), tokenizer, chat_template=template)


FAMILY = Family(
    name="deepstack",
    title="Qwen3VLForConditionalGeneration",
    before="<|vision_start|>",
    placeholder="<|image_pad|>",
    after="<|vision_end|>",
    config=_config,
    processor=_processor,
    pixels=qwen_pixels,
    axes=3,
)
