"""The model directory in the package: finding and loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kamera.engines.hf import load_processor


def weights_dir() -> Path:
    """The packaged model directory, in Hugging Face's format."""
    return Path(__file__).parent / "weights" / "gqa"


def load(*, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The trained backbone in eval mode and its processor; no network, no torchvision."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        weights_dir(), dtype=dtype, local_files_only=True
    )
    return model.eval(), load_processor(weights_dir())
