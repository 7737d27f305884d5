"""MHA: LLaVA with a Pixtral tower, which takes pictures of any size, before a Llama."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlavaConfig, PreTrainedTokenizerBase
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from .family import CELL, HEADS, Family, text_config


def _config(tokenizer: PreTrainedTokenizerBase) -> Any:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 48,
        "patch_size": CELL,
        "image_size": 64 * CELL,
        "initializer_range": 0.05,
    }
    return LlavaConfig(
        text_config=text_config(tokenizer, model_type="llama", num_key_value_heads=HEADS),
        vision_config=vision,
        image_token_index=tokenizer.get_vocab()["<image>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        dtype="float32",
    )


def _processor(tokenizer: PreTrainedTokenizerBase, template: str) -> Any:
    size = {"height": CELL, "width": CELL}
    return LlavaProcessor(
        PixtralImageProcessorPil(patch_size=size, size={"longest_edge": 64 * CELL}),
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="full",
        chat_template=template,
        image_token="<image>",
    )


def _pixels(frames: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    height, width = (max(f.shape[axis] for f in frames) for axis in (-2, -1))
    padded = [F.pad(f, (0, width - f.shape[-1], 0, height - f.shape[-2])) for f in frames]
    sizes = torch.tensor([tuple(f.shape[-2:]) for f in frames] * len(frames[0]))
    return {"pixel_values": torch.stack(padded, 1).flatten(0, 1), "image_sizes": sizes}


FAMILY = Family(
    name="mha",
    title="LlavaForConditionalGeneration",
    before="",
    placeholder="<image>",
    after="",
    config=_config,
    processor=_processor,
    pixels=_pixels,
)
