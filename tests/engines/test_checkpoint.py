"""One fingerprint of a model by its files: equal for every engine on them, unequal for any change of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kamera import Backbone
from kamera.engines import checkpoint_fingerprint
from kamera.engines.hf import HfEngine
from tests.models import tiny

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny language model as transformers saves it."""
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    tiny.randomise(model, 1)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def of(folder: Path, **given) -> str:
    return checkpoint_fingerprint(folder, **{"dtype": "float32", **given})


def edited(folder: Path, name: str, **changes) -> None:
    settings = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**settings, **changes}))


def test_a_backbone_has_the_fingerprint_of_its_files(folder):
    backbone = Backbone.from_pretrained(folder, dtype="float32", by_files=True).engine
    assert (
        backbone.fingerprint == of(folder) == Backbone.from_pretrained(str(folder), by_files=True).fingerprint
    )
    assert Backbone.from_pretrained(folder, dtype="bfloat16", by_files=True).fingerprint == of(
        folder, dtype="bfloat16"
    )
    assert HfEngine(backbone.model).fingerprint != of(folder)  # a live model is in no file


def _byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    status = os.stat(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # same path, size and time: no proof


def _renamed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    first, *_ = tensors
    tensors["other"] = tensors.pop(first)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _exchanged(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = [n for n in tensors if n.endswith("input_layernorm.weight")]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]] + 1, tensors[names[0]]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _reshaped(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    first, *_ = tensors
    tensors[first] = tensors[first].reshape(1, -1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _lora(folder: Path) -> None:
    edited(folder, "adapter_config.json", peft_type="LORA", r=2)


CHANGES = {
    "a byte": _byte,
    "a name": _renamed,
    "two tensors": _exchanged,
    "a shape": _reshaped,
    "an adapter beside it": _lora,
    "YaRN": lambda folder: edited(folder, "config.json", rope_parameters=YARN),
    "a norm": lambda folder: edited(folder, "config.json", rms_norm_eps=1e-3),
    "pixels": lambda folder: edited(folder, "preprocessor_config.json", max_pixels=64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_files_changes_it(folder, change):
    before = of(folder)
    assert of(folder) == before
    CHANGES[change](folder)
    assert of(folder) != before


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"kv_dtype": "fp8_e4m3"},
        {"overrides": {"rope_parameters": YARN}},
        {"overrides": {"rope_parameters": {**YARN, "factor": 8.0}}},
        {"overrides": {"num_attention_heads": 2}},
        {"pixels": {"max_pixels": 64}},
    ],
)
def test_whatever_an_engine_was_started_with_changes_it(folder, given):
    assert of(folder, **given) != of(folder)
