"""The model directories of all families: writing one after training, finding and loading the trained ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kamera import testbed
from kamera.engines.hf.load import load_processor

from .families import family as _family
from .frontend import build_processor


def weights_dir(family: str = "gqa") -> Path:
    """The model directory of a family: the package's for the one it ships, else the laboratory's."""
    shipped = testbed.weights_dir()
    name = _family(family).name
    return shipped if shipped.name == name else Path(__file__).parent / "weights" / name


def export(model: Any, family: str, directory: Path) -> None:
    """Write model (bf16) and processor as a Hugging Face model directory."""
    small = type(model)(copy.deepcopy(model.config))
    small.load_state_dict(model.state_dict())
    small.bfloat16()
    processor = build_processor(family)
    small.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    small.save_pretrained(directory)
    processor.save_pretrained(directory)


def load(
    family: str = "gqa", directory: Path | str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """The trained backbone of a family in eval mode and its processor; no network, no torchvision."""
    import transformers

    directory = weights_dir(family) if directory is None else Path(directory)
    model = getattr(transformers, _family(family).title).from_pretrained(
        directory, dtype=dtype, local_files_only=True
    )
    return model.eval(), load_processor(directory)
