"""One fingerprint of a model by its files: equal for every engine on them, unequal for any change of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kamera import Backbone
from kamera.engines import checkpoint_fingerprint
from kamera.engines.hf import HfEngine
from kamera.errors import UnsupportedBackbone
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


def test_settings_that_change_nothing_do_not(folder):
    dtype = of(folder)
    assert (
        dtype
        == of(folder, kv_dtype="auto")
        == of(folder, kv_dtype="float32")
        == of(folder, dtype=torch.float32)
    )
    written = json.loads((folder / "config.json").read_text())
    assert of(folder, overrides={"rms_norm_eps": written["rms_norm_eps"]}) == dtype
    edited(folder, "config.json", transformers_version="4.0.0", _name_or_path="/elsewhere")
    assert of(folder) == dtype


@pytest.mark.parametrize("how", ["options", "meanwhile"])
def test_a_model_that_is_not_what_its_files_say_has_one_of_its_own(folder, how, monkeypatch):
    options = {}
    if how == "options":
        options = {"rope_parameters": YARN}
    else:
        from kamera.engines.hf import backbone as loading

        real_load = loading.load_processor

        def meanwhile(name):
            _byte(folder)
            return real_load(name)

        monkeypatch.setattr(loading, "load_processor", meanwhile)
    backbone = Backbone.from_pretrained(folder, dtype="float32", **options, by_files=True).engine
    assert backbone.fingerprint != of(folder) and len(backbone.fingerprint) == 64


@pytest.mark.parametrize("how", ["nothing", "no weights", "no config", "cut", "header", "outside", "list"])
def test_folders_that_have_none_are_refused_by_name(folder, how):
    weights = folder / "model.safetensors"
    if how == "nothing":
        shutil.rmtree(folder)
    elif how == "no weights":
        weights.unlink()
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif how == "header":
        weights.write_bytes(b"\xff" * 64)
    elif how == "outside":
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        weights.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    else:
        (folder / "config.json").write_text("[]")
    with pytest.raises(UnsupportedBackbone) as refused:
        of(folder)
    assert "\n" not in str(refused.value)
