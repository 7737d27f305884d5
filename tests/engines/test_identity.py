"""The fingerprint: what decides a chunk's KV changes it, and nothing else does."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from kamera.engines.hf import Backbone, HfEngine, describe, forwards
from kamera.errors import UnsupportedBackbone
from tests.engines.changes import Steering
from tests.engines.compare import encoded, positions, worst
from tests.models import processors, tiny


def fingerprint(name: str = "llava", **options) -> str:
    return HfEngine(tiny.build(name, **options)).fingerprint


def test_only_equal_models_have_equal_fingerprints():
    base = fingerprint()
    assert base == fingerprint()
    others = [fingerprint(seed=1), fingerprint(dtype=torch.bfloat16), fingerprint("llava_llama3")]
    assert len({base, *others}) == 4


def test_one_weight_element_counts():
    model = tiny.build("llava")
    with torch.no_grad():
        model.get_parameter("model.language_model.layers.1.mlp.up_proj.weight")[3, 5] += 1e-6
    assert HfEngine(model).fingerprint != fingerprint()


def test_a_weight_of_the_vision_tower_counts():
    model = tiny.build("llava")
    with torch.no_grad():
        next(model.model.vision_tower.parameters()).flatten()[0] += 1.0
    assert HfEngine(model).fingerprint != fingerprint()


def test_an_adapter_parameter_counts():
    model = tiny.build("llava")
    layer = model.model.language_model.layers[0].self_attn.q_proj
    layer.register_parameter("lora_A", nn.Parameter(torch.zeros(2, 64)))
    assert HfEngine(model).fingerprint != fingerprint()


def test_rotary_frequencies_count_whether_by_config_or_by_buffer():
    model = tiny.build("llava")
    model.model.language_model.rotary_emb.inv_freq.mul_(1.001)
    by_buffer = HfEngine(model).fingerprint
    config = tiny.build("llava").config
    config.text_config.rope_parameters["rope_theta"] = 12_345.0
    other = type(model)(config).eval()
    other.load_state_dict(tiny.build("llava").state_dict())
    assert len({fingerprint(), by_buffer, HfEngine(other).fingerprint}) == 3


def test_later_changes_of_weights_are_noticed():
    b = HfEngine(tiny.build("llava"))
    layer = b.model.model.language_model.layers[2].mlp.up_proj
    kept = layer.weight.detach().clone()
    seen = [b.fingerprint]
    with torch.no_grad():
        layer.weight[0, 0] += 1
    seen.append(b.fingerprint)
    layer.weight = nn.Parameter(kept + 2)
    seen.append(b.fingerprint)
    layer.weight.data = kept + 3
    seen.append(b.fingerprint)
    layer.register_parameter("lora_A", nn.Parameter(torch.zeros(2)))
    seen.append(b.fingerprint)
    assert len(set(seen)) == 5
    del layer.lora_A
    b.model.load_state_dict(tiny.build("llava").state_dict())
    assert b.fingerprint == seen[0]


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


def test_later_changes_of_processor_settings_are_noticed():
    b = HfEngine(processors.matching_model(), processors.picture_processor())
    before = b.fingerprint
    b.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert b.fingerprint != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_loads_of_a_directory_are_one_backbone(tmp_path, dtype):
    model = tiny.build("qwen2_5_vl", dtype)
    model.save_pretrained(tmp_path)
    first, second = (Backbone.from_pretrained(tmp_path, dtype=dtype).engine for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert describe(first).dtype == str(dtype).removeprefix("torch.")
    assert first.processor is None
    span = encoded(first, "qwen2_5_vl")
    (place,) = positions(first, span)
    memory = HfEngine(model)
    assert worst(forwards.run(first, span, place)[0], forwards.run(memory, span, place)[0]) == 0
    assert first.fingerprint == memory.fingerprint


def test_the_directorys_name_does_not_count(tmp_path):
    model = tiny.build("deepseek_v3")
    prints = set()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / name)
        prints.add(Backbone.from_pretrained(tmp_path / name).fingerprint)
    assert len(prints) == 1


def test_a_directory_brings_its_processor(tmp_path):
    processors.matching_model().save_pretrained(tmp_path)
    processors.tokenizer(processors.CHATML).save_pretrained(tmp_path)
    b = Backbone.from_pretrained(str(tmp_path)).engine
    assert b.builder.detokenize(b.chunk("hello").input_ids) == "hello"


def test_what_is_no_model_directory_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedBackbone, match="no transformers model at"):
        Backbone.from_pretrained(tmp_path)
    with pytest.raises(UnsupportedBackbone, match="no transformers model at '/nowhere'"):
        Backbone.from_pretrained("/nowhere")


def test_switching_merging_and_removing_an_adapter_is_noticed():
    peft = pytest.importorskip("peft")
    model = tiny.build("llava")
    plain = HfEngine(model).fingerprint
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, adapter_name="one")
    wrapped.add_adapter("two", config)
    backbone = HfEngine(wrapped)  # the wrapper itself is stepped out of
    seen = {"plain": plain, "one": backbone.fingerprint}
    wrapped.set_adapter("two")
    seen["two"] = backbone.fingerprint
    wrapped.merge_adapter()  # PEFT writes through tensor.data
    seen["two, merged"] = backbone.fingerprint
    wrapped.unmerge_adapter()
    wrapped.set_adapter("one")
    assert len(set(seen.values())) == len(seen), seen
    with wrapped.disable_adapter():
        assert backbone.fingerprint not in seen.values()


def test_an_adapter_that_learns_a_prompt_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapped = peft.get_peft_model(tiny.build("deepseek_v3"), config)
    with pytest.raises(UnsupportedBackbone, match="learn a prompt"):
        HfEngine(wrapped)


# -- all a module computes with --------------------------------------------------------------------


def _dynamic(seed: int = 0) -> nn.Module:
    """A model in int8 that differs by its seed in packed parameters alone."""
    model = torch.ao.quantization.quantize_dynamic(tiny.build("llava", seed=seed), {nn.Linear})
    plain = dict(tiny.build("llava").named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain[name])
    return model


def _weights_as(kind: type, seed: int = 0) -> nn.Module:
    model = tiny.build("llava")
    head = model.lm_head  # no KV depends on it
    weight = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
    head.weight = nn.Parameter(kind(weight, weight), requires_grad=False)
    return model


def test_kv_in_tensors_of_a_class_of_its_own_is_refused_by_name():
    model = tiny.build("llava")
    up = model.model.language_model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(TwoTensor(up.weight.detach(), up.weight.detach()), requires_grad=False)
    with pytest.raises(UnsupportedBackbone, match="KV as TwoTensor, whose memory no kernel can read"):
        HfEngine(model)


def _with_quantiser(scale: float) -> nn.Module:
    model = tiny.build("llava")
    model.lm_head.weight.quant_state = SimpleNamespace(absmax=torch.full((3,), scale), code="nf4")
    return model


def _affine(scale: float) -> nn.Module:
    model = tiny.build("llava")
    codes = torch.quantize_per_tensor(torch.zeros(8, 8), scale, 0, torch.qint8)
    model.model.language_model.layers[0].register_buffer("codes", codes)
    return model


def _steered(strength: float) -> nn.Module:
    model = tiny.build("llava")
    model.model.language_model.layers[0].register_forward_hook(Steering(strength))
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda n: _dynamic(seed=n),
        lambda n: _weights_as(TwoTensor, seed=n),
        lambda n: _with_quantiser(float(n)),
        lambda n: _affine(0.5 + n),
        lambda n: _steered(1.0 + n),
    ],
    ids=[
        "packed parameters",
        "tensors of tensors",
        "state of a quantiser",
        "affine codes",
        "a hook's strength",
    ],
)
def test_what_a_module_computes_with_beside_its_parameters_counts(build):
    one, equal, other = HfEngine(build(0)), HfEngine(build(0)), HfEngine(build(1))
    assert one.identity.unread == ()
    assert one.fingerprint == equal.fingerprint
    assert one.fingerprint != other.fingerprint


def _unreadable() -> nn.Module:
    model = tiny.build("llava")
    generator = (x for x in [1.0, 2.0])  # tells nobody what comes next
    model.model.language_model.layers[0].mlp.register_forward_hook(lambda m, i, o: o * next(generator, 1.0))
    return model


def test_a_model_that_cannot_be_digested_is_equal_to_no_other(caplog):
    model = _unreadable()
    with caplog.at_level(logging.WARNING, "kamera"):
        one = HfEngine(model)
    other = HfEngine(_unreadable())
    assert "cannot be digested" in caplog.text and "a builtins.generator" in caplog.text
    assert one.fingerprint == one.fingerprint
    assert one.identity.vision() == other.identity.vision()  # the hook is in the decoder's layers
    assert len({one.fingerprint, other.fingerprint, HfEngine(model).fingerprint}) == 3
    plain = HfEngine(tiny.build("llava"))
    assert plain.identity.unread == ()
