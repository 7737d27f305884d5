"""The fingerprint: what decides a chunk's KV changes it, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kamera.engines.hf import HfEngine
from tests.models import processors, tiny

FAMILY = "llava"


def fingerprint(name: str = FAMILY, **options) -> str:
    return HfEngine(tiny.build(name, **options)).fingerprint


def _layer(model: Any, index: int = 1) -> Any:
    return model.model.language_model.layers[index]


# -- what counts -----------------------------------------------------------------------------------


def one_weight(model: Any) -> None:
    with torch.no_grad():
        _layer(model).mlp.up_proj.weight[3, 5] += 1e-6


def a_weight_of_the_tower(model: Any) -> None:
    with torch.no_grad():
        next(model.model.vision_tower.parameters()).flatten()[0] += 1.0


def a_parameter(model: Any) -> None:
    _layer(model).self_attn.q_proj.register_parameter("extra", nn.Parameter(torch.zeros(2, 64)))


def a_buffer(model: Any) -> None:
    _layer(model).register_buffer("codes", torch.zeros(3), persistent=False)


def affine_codes(model: Any) -> None:
    _layer(model).register_buffer("codes", torch.quantize_per_tensor(torch.zeros(8, 8), 0.5, 0, torch.qint8))


def other_affine_codes(model: Any) -> None:
    _layer(model).register_buffer("codes", torch.quantize_per_tensor(torch.zeros(8, 8), 1.5, 0, torch.qint8))


def the_class_of_a_module(model: Any) -> None:
    _layer(model).mlp.act_fn = nn.GELU()


def rotary_frequencies(model: Any) -> None:
    model.model.language_model.rotary_emb.inv_freq.mul_(1.001)


def a_setting(model: Any) -> None:
    model.config.text_config.rms_norm_eps *= 2


def a_kernel_of_ones_own(model: Any) -> None:
    usual = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register("of_my_own", usual)
    transformers.AttentionMaskInterface.register("of_my_own", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("of_my_own")


def training(model: Any) -> None:
    model.train()


CHANGES = [
    one_weight,
    a_weight_of_the_tower,
    a_parameter,
    a_buffer,
    affine_codes,
    other_affine_codes,
    the_class_of_a_module,
    rotary_frequencies,
    a_setting,
    a_kernel_of_ones_own,
    training,
]
MADE: dict[str, str] = {}
"""The fingerprints that the changes come to, by their names."""


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_one_thing_is_another_model(change: Callable[[Any], None]):
    made = [tiny.build(FAMILY) for _ in range(2)]
    for model in made:
        change(model)
    one, other = (HfEngine(model).fingerprint for model in made)
    assert one == other
    assert one not in {fingerprint(), *(print for name, print in MADE.items() if name != change.__name__)}
    MADE[change.__name__] = one


@pytest.mark.few(1)
@pytest.mark.parametrize("part", ["picture size", "chat template", "vocabulary", "no processor"])
def test_the_processors_settings_count(part):
    model = processors.matching_model()
    other = processors.picture_processor()
    if part == "picture size":
        other = processors.picture_processor(longest_edge=32 * 32)
    elif part == "chat template":
        other = processors.picture_processor(processors.CHATML + " ")
    elif part == "vocabulary":
        other.tokenizer.add_tokens(["kamera"])
    else:
        other = None
    same = HfEngine(model, processors.picture_processor()).fingerprint
    assert same == HfEngine(model, processors.picture_processor()).fingerprint
    assert same != HfEngine(model, other).fingerprint


# -- adapters --------------------------------------------------------------------------------------


def _adapted(*names: str, **settings: Any) -> Any:
    """A PEFT model whose adapters have equal weights; the first of ``names`` is active."""
    peft = pytest.importorskip("peft")
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | settings
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(tiny.build(FAMILY), peft.LoraConfig(**options), adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.fill_(0.02 if "lora_A" in name else 0.03)
    return wrapped


@pytest.mark.slow
def test_adapters_are_told_apart_by_what_they_are_set_to():
    merged, off = _adapted("one"), _adapted("one")
    merged.merge_adapter()
    off.base_model.disable_adapter_layers()
    models = {
        "none": tiny.build(FAMILY),
        "one": _adapted("one"),
        "scaled otherwise": _adapted("one", lora_alpha=3),
        "two, the first active": _adapted("one", "two"),
        "merged": merged,
        "disabled": off,
    }
    second = _adapted("one", "two")
    second.set_adapter("two")
    models["two, the second active"] = second
    prints = {name: HfEngine(model).fingerprint for name, model in models.items()}
    assert len(set(prints.values())) == len(prints), prints
    assert HfEngine(_adapted("one")).fingerprint == prints["one"]


# -- what does not ---------------------------------------------------------------------------------


def test_another_process_finds_the_same_fingerprint():
    code = (
        "from tests.models import tiny; from kamera import Backbone; import torch; "
        "torch.set_num_threads(1); print(Backbone(tiny.build('gemma4_vl')).fingerprint)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == tiny.backbone("gemma4_vl").fingerprint


# -- loading ---------------------------------------------------------------------------------------
