"""Published models as shapes: full size, real classes of transformers, weights of noise, nothing downloaded.

What an edit or a prefill costs is decided by shapes, not by what the weights know. Numbers are those of each
checkpoint's own config.json. Depth can be cut for small machines (`Preset.build`): width, heads and head
size, which decide bytes and work per token of a layer, stay. With the depth goes the vocabulary, whose
embedding would otherwise outweigh the layers that are left; the last token alone reads it, in all arms alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights

from kamera.engines.hf import HfEngine

IMAGE, VISION_START, VISION_END, VIDEO = 3, 4, 5, 6
"""Special token ids, low in every preset so that a cut vocabulary has them."""
FIRST_WORD = 16
"""Ordinary token ids begin here."""
CUT_VOCABULARY = 4096
"""Entries of the vocabulary of a preset whose depth is cut."""

Pictures = Literal["patches", "grid"]
"""How a family takes pixels: Qwen's flat patches, or Kimi's patches."""

_WRITTEN = 1 << 22  # weights are one block of noise of about this many values, repeated


@dataclass(frozen=True)
class Preset:
    """A published model's shape.

    ``config`` are the arguments of ``<model>Config`` of transformers, ``depth`` where in its vision part
    the number of layers stands, ``taps`` which vision settings name layers. ``stands_for`` says in one
    line what differs from the checkpoint it is named after, besides weights and token ids.
    """

    name: str
    checkpoint: str
    stands_for: str
    model: str
    pictures: Pictures
    depth: str
    config: Mapping[str, Any]
    taps: tuple[str, ...] = ()

    @property
    def text(self) -> Mapping[str, Any]:
        """The decoder's numbers."""
        text: Mapping[str, Any] = self.config["text_config"]
        return text

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision tower's numbers."""
        vision: Mapping[str, Any] = self.config["vision_config"]
        return vision

    def build(
        self,
        layers: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> HfEngine:
        """The model with random weights, its first ``layers`` layers (None: all) of decoder and tower.

        Rotary buffers stay float32, as ``from_pretrained`` leaves them.
        """
        kind: Any = getattr(transformers, f"{self.model}Config")
        made = kind(**self.cut(layers), tie_word_embeddings=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), no_init_weights():
                model = getattr(transformers, f"{self.model}ForConditionalGeneration")(made).eval()
        finally:
            torch.set_default_dtype(before)
        fill(model, seed)
        return HfEngine(model.requires_grad_(False))

    def cut(self, layers: int | None) -> dict[str, Any]:
        """The arguments of the config class with depth and vocabulary cut; as they are for None."""
        config = {**self.config, "text_config": dict(self.text), "vision_config": dict(self.vision)}
        if layers is None:
            return config
        text, vision = config["text_config"], config["vision_config"]
        text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
        text["vocab_size"] = min(CUT_VOCABULARY, text["vocab_size"])
        vision[self.depth] = min(layers, vision[self.depth])
        for tap in self.taps:  # as many of them as there are layers left, the last ones
            kept = vision[tap][: vision[self.depth]]
            vision[tap] = list(range(vision[self.depth] - len(kept), vision[self.depth]))
        return config


def fill(model: nn.Module, seed: int) -> None:
    """Write every weight: noise of std 0.02, ones for norms, zeros for biases. Seconds for billions.

    Copies of one block of noise, shifted against each other: timings ask no more of them.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(_WRITTEN + 3).normal_(0.0, 0.02, generator=generator)
    blocks: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            where = (weight.device, weight.dtype)
            block = blocks.setdefault(where, noise.to(*where))
            flat = weight.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:  # uninitialised otherwise: which experts are preferred
                buffer.zero_()


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
TINY = replace(
    QWEN2_5_VL_3B,
    name="tiny",
    checkpoint="none",
    stands_for="Qwen2.5-VL at a size for tests",
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

PRESETS: Mapping[str, Preset] = {p.name: p for p in (QWEN2_5_VL_3B, QWEN2_5_VL_7B, KIMI_VL_A3B, TINY)}


def preset(name: str) -> Preset:
    """The preset called ``name``; ValueError, with the names there are, for another."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is none of {', '.join(PRESETS)}")
    return PRESETS[name]
