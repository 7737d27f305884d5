"""Tiny models saved to directories with a real processor, and plans over real pictures."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.testbed.frontend import build_processor
from kamera.engines.hf import Backbone, HfEngine
from kamera.testbed.frames import CELL
from tests.models import tiny

SYSTEM = "You watch a camera."


@functools.cache
def vision_model() -> Path:
    """A directory with a tiny Qwen2.5-VL of random weights and the testbed's image-only processor."""
    processor = build_processor()
    token = processor.tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": -(-len(processor.tokenizer) // 16) * 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": CELL // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 4 * CELL,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {f"vision_{end}": f"<|vision_{end}|>" for end in ("start", "end")}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **{f"{k}_token_id": token(v) for k, v in names.items()}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    tiny.randomise(model, seed=1)
    directory = _directory()
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


@functools.cache
def bare_model(family: str) -> Path:
    """A directory with a family's tiny model and no processor."""
    directory = _directory()
    tiny.build(family).save_pretrained(directory)
    return directory


@functools.cache
def vision_backbone() -> HfEngine:
    """The backbone in `vision_model`, shared by the tests of this process."""
    return Backbone.from_pretrained(vision_model(), dtype="float32").engine


def pictures(folder: Path, count: int, cells: int = 2) -> list[str]:
    """Names of ``count`` different pictures written to ``folder``, ``cells`` x ``cells`` tokens each."""
    rng = np.random.default_rng(0)
    names = [f"{i}.png" for i in range(count)]
    for name in names:
        pixels = rng.integers(256, size=(cells * CELL, cells * CELL, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return names


def write_plan(folder: Path, *windows: list, system: str | None = SYSTEM, name: str = "plan.jsonl") -> Path:
    """A plan of these windows (lists of contents)."""
    path = folder / name
    lines = [json.dumps({"system": system, "chunks": list(chunks)}) for chunks in windows]
    path.write_text("\n".join(lines) + "\n")
    return path


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _directory() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="kamera-test-"))  # removed when the process ends
    return Path(_KEPT[-1].name)
