"""The model directory: writing it after training, finding and loading the one in the package."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

from kamera.backbones.load import load_processor


def weights_dir() -> Path:
    """The packaged model directory: an ordinary Hugging Face one."""
    return Path(__file__).parent / "backbone"


def export(model: Qwen2_5_VLForConditionalGeneration, processor: Any, directory: Path) -> None:
    """Write model (bf16) and processor as a Hugging Face model directory."""
    small = Qwen2_5_VLForConditionalGeneration(copy.deepcopy(model.config))
    small.load_state_dict(model.state_dict())
    small.bfloat16()
    small.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    small.save_pretrained(directory)
    processor.save_pretrained(directory)


def load(
    directory: Path | str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Qwen2_5_VLForConditionalGeneration, Any]:
    """The trained backbone in eval mode and its processor; no network, no torchvision."""
    directory = weights_dir() if directory is None else Path(directory)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.eval(), load_processor(directory)
