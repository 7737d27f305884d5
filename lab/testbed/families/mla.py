"""MLA: Kimi-K2.5, a MoonViT before DeepSeek-V3's latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Kimi_K25Config, PreTrainedTokenizerBase
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from kamera.content.kimi_pictures import KimiPictureProcessor, KimiPictures

from .family import HEAD_DIM, HEADS, LAYERS, PATCH, Family, by_window, grids, patches, text_config


def _config(tokenizer: PreTrainedTokenizerBase) -> Any:
    vocabulary = tokenizer.get_vocab()
    text = text_config(
        tokenizer,
        model_type="deepseek_v3",
        num_key_value_heads=HEADS,
        kv_lora_rank=96,
        q_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=HEAD_DIM,
        # queries and keys pass two thin matrices: at .05 they start too flat to look anything up
        initializer_range=0.07,
        # every layer dense: routing would only make a model of this size harder to train
        first_k_dense_replace=LAYERS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": PATCH,
        "merge_kernel_size": [2, 2],
        "pos_emb_height": 32,
        "pos_emb_width": 32,
        "pos_emb_time": 4,
        "initializer_range": 0.05,
    }
    return Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=64,
        image_token_id=vocabulary["<|media_pad|>"],
        video_token_id=vocabulary["<|kimi_k25_video_placeholder|>"],
        vision_start_token_id=vocabulary["<|media_begin|>"],
        vision_end_token_id=vocabulary["<|media_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )


def _processor(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    pictures = KimiPictures(patch_size=PATCH, image_mean=OPENAI_CLIP_MEAN, image_std=OPENAI_CLIP_STD)
    return KimiPictureProcessor(pictures, tokenizer, chat_template=template)


def _pixels(frames: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    # MoonViT takes patches row by row and merges them itself
    return {"pixel_values": by_window([patches(f, 1) for f in frames]), "image_grid_thw": grids(frames)}


FAMILY = Family(
    name="mla",
    title="Kimi_K25ForConditionalGeneration",
    before="<|media_begin|>image<|media_content|>",
    placeholder="<|media_pad|>",
    after="<|media_end|>",
    config=_config,
    processor=_processor,
    pixels=_pixels,
)
