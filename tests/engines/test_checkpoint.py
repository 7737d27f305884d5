"""One fingerprint of a model by its files: equal for every engine on them, unequal for any change of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kamera import Backbone
from kamera.engines import checkpoint, checkpoint_fingerprint
from kamera.engines.hf import HfEngine
from kamera.errors import UnsupportedBackbone
from kamera.testbed import weights_dir
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


def test_the_backbone_that_ships_has_it_too():
    backbone = Backbone.from_pretrained(weights_dir(), dtype="float32", by_files=True).engine
    assert backbone.fingerprint == of(weights_dir())


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


def test_none_of_the_settings_stands_for_another(folder):
    """Equal text in another argument: a setting can take no other's place."""
    text = {"a": "b"}
    given = [{"overrides": text}, {"pixels": text}, {"kv_dtype": "a"}, {"dtype": "a"}]
    assert len({of(folder, **one) for one in given}) == len(given)


def test_tensors_count_however_they_are_spread_over_files(folder):
    whole, tensors = of(folder), load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for i, some in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in some}, folder / f"model-{i}.safetensors", {"format": "pt"})
    assert of(folder) == whole


def test_adapters_change_it_in_any_order(folder, tmp_path):
    adapters = []
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        edited(tmp_path / str(i), "adapter_config.json", r=2, base_model_name_or_path=f"/of/{i}")
        save_file({"lora_A": torch.full((2, 4), float(i))}, tmp_path / str(i) / "adapter_model.safetensors")
        adapters.append(tmp_path / str(i))
    prints = [of(folder), *(of(folder, adapters=some) for some in ([adapters[0]], [adapters[1]], adapters))]
    assert len(set(prints)) == 4 and prints[3] == of(folder, adapters=adapters[::-1])


def test_a_file_is_hashed_once_and_again_when_it_changed(folder, monkeypatch):
    hashed: list[str] = []
    real = checkpoint._hash
    monkeypatch.setattr(checkpoint, "_SETTLED", 0)
    monkeypatch.setattr(checkpoint, "_hash", lambda *given: hashed.append("one") or real(*given))
    first = of(folder)
    count = len(hashed)
    assert count > 5 and of(folder) == first and len(hashed) == count
    _byte(folder)
    assert of(folder) != first and len(hashed) == 2 * count


def test_a_model_that_changed_has_a_fingerprint_of_its_own_until_it_is_put_back(folder):
    backbone = Backbone.from_pretrained(folder, dtype="float32", by_files=True)
    files, weight = backbone.fingerprint, next(backbone.model.parameters())
    own = weight.detach().clone()
    with torch.no_grad():
        weight += 1
        changed = backbone.refresh()
        weight.copy_(own)
    assert backbone.refresh() == files
    hook = backbone.model.model.layers[0].register_forward_hook(lambda m, args, out: out * 2)
    hooked = backbone.fingerprint
    hook.remove()
    assert len({files, changed, hooked}) == 3 and backbone.fingerprint == files
    named = Backbone.from_pretrained(folder, dtype="float32", by_files=True, variant="steered")
    assert named.fingerprint not in (files, changed, hooked)


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


def test_it_is_computed_where_no_transformers_is_installed(folder):
    """In a process that cannot import it: the same digest."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from kamera.engines import checkpoint_fingerprint\n"
        "print(checkpoint_fingerprint(sys.argv[1], dtype='float32'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == Backbone.from_pretrained(folder, dtype="float32", by_files=True).fingerprint
