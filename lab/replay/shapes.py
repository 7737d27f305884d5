"""Published shapes behind the chat template of a trained backbone: sessions of their real sizes, on noise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from kamera.content import Message
from kamera.engines.hf import HfEngine
from lab.replay.styles import styled
from lab.speed.presets import TINY, Preset, preset
from lab.testbed import load

_SPEAKERS = {"patches": "gqa", "grid": "mla"}
"""The trained backbone whose processor takes pictures as a preset does."""
_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_LARGEST = 4096


def shaped(name: str, layers: int | None, dtype: torch.dtype) -> HfEngine:
    """The preset's model of random weights, which takes messages.

    Raises `ValueError` for a preset whose pictures no trained backbone's processor makes.
    """
    return _spoken(preset(name), layers, dtype)


def thin(layers: int, style: str) -> HfEngine:
    """A Qwen2.5-VL of as many thin layers, random weights and a chat template of `lab.replay.styles`.

    One head of 16 dimensions: what is counted on it is the same on a wide one, and a prompt of 13,000 tokens
    takes seconds. A picture of 8 s pixels a side has s² tokens.
    """
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    text = {**TINY.text, **narrow, "num_hidden_layers": layers, "max_position_embeddings": 1 << 17}
    vision = {**TINY.vision, "out_hidden_size": narrow["hidden_size"]}
    shape = replace(TINY, config={**TINY.config, "text_config": text, "vision_config": vision})
    backbone = _spoken(shape, None, torch.float32)
    processor: Any = backbone.processor
    processor.chat_template = styled(processor, style)
    return HfEngine(backbone.model, processor)


def _spoken(shape: Preset, layers: int | None, dtype: torch.dtype) -> HfEngine:
    """A shape's model behind the processor of the trained backbone that takes its pictures."""
    if shape.pictures not in _SPEAKERS:
        raise ValueError(f"preset {shape.name!r} takes pictures as no trained backbone does")
    model, processor = load(_SPEAKERS[shape.pictures])
    processor = copy.deepcopy(processor)
    pictures = processor.image_processor
    pictures.patch_size = int(shape.vision["patch_size"])
    side = {"shortest_edge": 28**2, "longest_edge": _LARGEST**2}
    pictures.size = side if shape.pictures == "patches" else {"max_height": _LARGEST, "max_width": _LARGEST}
    ids = {key: getattr(model.config, key) for key in _IDS if hasattr(model.config, key)}
    words = max(int(shape.text["vocab_size"]), len(processor.tokenizer))
    text = {**shape.text, "vocab_size": words}
    made = replace(shape, config={**shape.config, **ids, "text_config": text}).build(layers, dtype=dtype)
    return HfEngine(made.model, processor)


def enlarged(turns: Sequence[Sequence[Message]], side: int) -> list[list[dict[str, Any]]]:
    """The same sessions with pictures of ``side`` pixels; one picture stays one picture."""
    made: dict[int, Image.Image] = {}

    def item_of(item: Any) -> Any:
        if not (isinstance(item, dict) and "image" in item):
            return item
        old = item["image"]
        if id(old) not in made:
            made[id(old)] = old.resize((side, side), Image.Resampling.NEAREST)
        return {**item, "image": made[id(old)]}

    def message_of(message: Message) -> dict[str, Any]:
        content = message.get("content")
        return {**message, "content": [item_of(i) for i in content] if isinstance(content, list) else content}

    return [[message_of(m) for m in messages] for messages in turns]
