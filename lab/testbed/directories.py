"""The model directories of all families: writing one after training, finding and loading the trained ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kamera import testbed
from kamera.engines.hf.load import load_processor

from .families import FAMILIES
from .families import family as _family
from .frontend import build_processor

UNLED = "-unled"
"""Behind a family's name: its backbone that was trained on answers and captions only (`unled`)."""
UNLED_BACKBONES: tuple[str, ...] = (f"gqa{UNLED}", f"mla{UNLED}")
"""Those of them that there are."""
BACKBONES: tuple[str, ...] = (*FAMILIES, *UNLED_BACKBONES)
"""Every trained backbone by name: one led for each family, and the unled."""


def family_of(name: str) -> str:
    """The family of a backbone of this name; ValueError for one that is not there."""
    if name not in BACKBONES:
        raise ValueError(f"no testbed family {name!r}: there are {', '.join(BACKBONES)}")
    return name.removesuffix(UNLED)


def weights_dir(name: str = "gqa") -> Path:
    """The model directory of a backbone: the package's for the one it ships, else the laboratory's."""
    family_of(name)
    shipped = testbed.weights_dir()
    return shipped if shipped.name == name else Path(__file__).parent / "weights" / name


def export(model: Any, family: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model and processor as a Hugging Face model directory."""
    small = type(model)(copy.deepcopy(model.config))
    small.load_state_dict(model.state_dict())
    small.to(dtype)
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
    name: str = "gqa", directory: Path | str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """A trained backbone in eval mode and its processor; no network, no torchvision.

    ``name`` is one of `BACKBONES`; with a ``directory`` it says the family of the model there.
    """
    import transformers

    directory = weights_dir(name) if directory is None else Path(directory)
    model = getattr(transformers, _family(family_of(name)).title).from_pretrained(
        directory, dtype=dtype, local_files_only=True
    )
    return model.eval(), load_processor(directory)
