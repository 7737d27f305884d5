"""The small MLA backbone that was trained on the testbed's world: Kimi-K2.5's classes, latents of 96.

The laboratory of commit e4b6e909 trained it, with seed 0 (docs/results/testbed/mla.json).
"""

from __future__ import annotations

import lzma
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kamera.engines.hf import load_model, load_processor

_KEPT = Path(__file__).with_name("weights") / "mla"


@lru_cache
def mla_directory() -> Path:
    """Its model directory, unpacked for this process."""
    made = Path(tempfile.mkdtemp(prefix="kamera-mla-"))
    for file in _KEPT.iterdir():
        if file.suffix == ".xz":
            (made / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
        else:
            shutil.copyfile(file, made / file.name)
    return made


def mla(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model and its processor."""
    where = str(mla_directory())
    return load_model(where, dtype=dtype), load_processor(where)
