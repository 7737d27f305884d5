"""The shipped backbone before it knows anything: a small Qwen2.5-VL, its processor and its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kamera.content.without_video import image_only

HIDDEN, LAYERS, HEADS, MLP = 256, 6, 4, 256
CELL = 16
PATCH = CELL // 2
AXES = 3
BEFORE, PLACEHOLDER, AFTER = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
"""What the chat template puts around the placeholders of a picture, one for each cell."""


def build(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model with random weights, drawn from torch's global generator."""
    return Qwen2_5_VLForConditionalGeneration(_config(tokenizer))


def _config(tokenizer: PreTrainedTokenizerBase) -> Any:
    vocabulary = tokenizer.get_vocab()
    text = {
        "vocab_size": -(-len(tokenizer) // 16) * 16,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]},
        "bos_token_id": None,
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
        "tie_word_embeddings": True,
    }
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
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        dtype="float32",
        image_token_id=vocabulary[PLACEHOLDER],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary[BEFORE],
        vision_end_token_id=vocabulary[AFTER],
    )


def processor(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    """A processor whose vision token is one cell: patches of 8 pixels, merged 2 x 2."""
    pictures = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": CELL * CELL, "longest_edge": (64 * CELL) ** 2},
    )
    return image_only(Qwen2_5_VLProcessor)(pictures, tokenizer, chat_template=template)


def pixels(frames: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Vision inputs of normalised pictures.

    ``frames`` is one ``[n, 3, height, width]`` for each frame of a window; the inputs are those of n windows,
    window by window: flat patches, those of a merge block together, the still picture repeated in time.
    """
    still = [_patches(f).unsqueeze(3).expand(-1, -1, -1, 2, -1, -1).flatten(2) for f in frames]
    grid = [(1, f.shape[-2] // PATCH, f.shape[-1] // PATCH) for f in frames]
    return {
        "pixel_values": torch.cat(still, dim=1).flatten(0, 1),
        "image_grid_thw": torch.tensor(grid * len(frames[0])),
    }


def _patches(pictures: torch.Tensor) -> torch.Tensor:
    n, _, height, width = pictures.shape
    rows, columns = height // PATCH, width // PATCH
    grid = pictures.reshape(n, 3, rows // 2, 2, PATCH, columns // 2, 2, PATCH)
    return grid.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(n, rows * columns, 3, PATCH, PATCH)
