"""The backbone: a small Qwen2.5-VL, and a batched vision path for training."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.vision_utils import get_vision_position_ids

from .render import CELL

HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 6, 4, 2


def build_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """6 layers of 256, 4 heads of 64 over 2 kv heads: 128 features per token, layer and channel."""
    token = tokenizer.get_vocab().__getitem__
    end, pad = token("<|im_end|>"), token("<|endoftext|>")
    text = dict(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        initializer_range=0.05,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[16, 8, 8]),
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=True,
    )
    vision = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=2,
        patch_size=CELL // 2,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=4 * CELL,
        out_hidden_size=HIDDEN,
        fullatt_block_indexes=[0, 1],
        tokens_per_second=2,
        initializer_range=0.05,
    )
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )


def build_model(config: Qwen2_5_VLConfig) -> Qwen2_5_VLForConditionalGeneration:
    """The model with random weights, drawn from torch's global generator."""
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.config._attn_implementation = "sdpa"
    return model


def to_unit(pixels: np.ndarray) -> torch.Tensor:
    """`[n, height, width, 3]` uint8 to float32 in 0..1."""
    return torch.from_numpy(pixels).float() / 255


def encode_images(model: Qwen2_5_VLForConditionalGeneration, images: torch.Tensor) -> torch.Tensor:
    """Vision tokens of images of one size, `[n, height, width, 3]` in 0..1 to `[n, tokens, hidden]`.

    Equal to the image processor followed by `model.get_image_features`, to rounding. Hugging Face
    loops over the images in its vision attention; here they are a batch. Only for towers whose
    blocks all attend to the whole picture.
    """
    visual = model.model.visual
    n, height, width, _ = images.shape
    patch, merge = visual.patch_size, visual.spatial_merge_size
    rows, columns = height // patch, width // patch
    images = (images - torch.tensor(OPENAI_CLIP_MEAN)) / torch.tensor(OPENAI_CLIP_STD)
    grid = (n, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    patches = images.reshape(grid).permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, rows * columns, -1)
    # A still picture is repeated in time, so the temporal taps of the kernel add up.
    hidden = F.linear(patches, visual.patch_embed.proj.weight.sum(2).flatten(1))

    position_ids = get_vision_position_ids(torch.tensor([[1, rows, columns]]), merge)
    cos, sin = (table.unsqueeze(0) for table in visual.rotary_pos_emb(hidden, position_ids))
    for block in visual.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(hidden))
        q, k, v = qkv.view(n, rows * columns, 3, attention.num_heads, -1).unbind(2)
        q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=attention.scaling
        )
        hidden = hidden + attention.proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
    merged = visual.merger(hidden.flatten(0, 1))
    return merged.view(n, -1, merged.shape[-1])
