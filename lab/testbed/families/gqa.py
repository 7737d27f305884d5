"""GQA: Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kamera.content.without_video import image_only

from .family import CELL, HIDDEN, PATCH, Family, qwen_pixels, text_config


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The media tokens of Qwen's configurations."""
    vocabulary = tokenizer.get_vocab()
    return {
        "image_token_id": vocabulary["<|image_pad|>"],
        "video_token_id": vocabulary["<|video_pad|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_end_token_id": vocabulary["<|vision_end|>"],
    }


def _config(tokenizer: PreTrainedTokenizerBase) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 4 * CELL,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0, 1],
        "tokens_per_second": 2,
        "initializer_range": 0.05,
    }
    return Qwen2_5_VLConfig(
        text_config=text_config(tokenizer, num_key_value_heads=2, rope_parameters=rope),
        vision_config=vision,
        tie_word_embeddings=True,
        dtype="float32",
        **token_ids(tokenizer),
    )


def qwen_pictures() -> Any:
    """The picture processor whose vision token is one cell: patches of 8 pixels, merged 2 x 2."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": CELL * CELL, "longest_edge": (64 * CELL) ** 2},
    )


def _processor(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    return image_only(Qwen2_5_VLProcessor)(qwen_pictures(), tokenizer, chat_template=template)


FAMILY = Family(
    name="gqa",
    title="Qwen2_5_VLForConditionalGeneration",
    before="<|vision_start|>",
    placeholder="<|image_pad|>",
    after="<|vision_end|>",
    config=_config,
    processor=_processor,
    pixels=qwen_pixels,
    axes=3,
)
