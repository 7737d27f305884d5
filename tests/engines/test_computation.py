"""The identity of a model is what it computes: what changes that is another model, or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kamera import ChunkStore
from kamera.engines.hf import HfEngine, Observer, forwards
from kamera.engines.hf.computation import computation
from kamera.errors import ComputationChanged, IncompatibleChunk
from tests.models import samples, tiny
from tests.window.rig import QUESTION, make

FAMILY = "qwen2_5_vl"


def _layer(model: Any) -> Any:
    return model.model.language_model.layers[1]


def _scaling(model: Any) -> None:
    _layer(model).self_attn.scaling *= 1.5


def _epsilon(model: Any) -> None:
    _layer(model).input_layernorm.variance_epsilon = 1e-2


def _activation(model: Any) -> None:
    _layer(model).mlp.act_fn = nn.GELU()


def _hook(model: Any) -> None:
    _layer(model).register_forward_hook(lambda module, given, output: output)


def _entry_hook(model: Any) -> None:
    _layer(model).mlp.register_forward_pre_hook(lambda module, given: given)


def _vision_frequencies(model: Any) -> None:
    model.model.visual.rotary_pos_emb.inv_freq.mul_(1.5)


def _vision_setting(model: Any) -> None:
    model.model.visual.blocks[0].attn.scaling = 0.1


def _own_forward(model: Any) -> None:
    plain = _layer(model).mlp.forward
    _layer(model).mlp.forward = lambda hidden: plain(hidden) * 2


def _config(model: Any) -> None:
    model.config.vision_config.spatial_merge_size = 1


SETTINGS = [
    _scaling,
    _epsilon,
    _activation,
    _hook,
    _entry_hook,
    _vision_frequencies,
    _vision_setting,
    _own_forward,
    _config,
]


@pytest.mark.parametrize("change", SETTINGS)
def test_a_setting_changes_the_fingerprint(change: Callable[[Any], None]):
    live = HfEngine(tiny.build(FAMILY))
    before = live.fingerprint
    change(live.model)
    assert live.fingerprint != before
    assert live.fingerprint == live.fingerprint
    if change is not _config:  # a model of another merge size is no backbone of these pixels
        made = tiny.build(FAMILY)
        change(made)
        assert HfEngine(made).fingerprint == live.fingerprint


def test_a_setting_put_back_is_the_first_model_again():
    backbone = HfEngine(tiny.build(FAMILY))
    before, attention = backbone.fingerprint, _layer(backbone.model).self_attn
    scaling = attention.scaling
    attention.scaling = scaling * 2
    assert backbone.fingerprint != before
    attention.scaling = scaling
    assert backbone.fingerprint == before
    handle = _layer(backbone.model).register_forward_hook(_hook)
    assert backbone.fingerprint != before
    handle.remove()
    assert backbone.fingerprint == before


def test_a_hook_for_all_modules_changes_the_fingerprint():
    backbone = tiny.backbone(FAMILY)
    before = backbone.fingerprint
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert backbone.fingerprint != before
    finally:
        handle.remove()
    assert backbone.fingerprint == before


def test_an_observer_is_no_part_of_the_model():
    backbone = HfEngine(tiny.build(FAMILY))
    before, plain = backbone.fingerprint, backbone.model(input_ids=QUESTION[None]).logits
    seen: list[int] = []

    def look(module: nn.Module, given: Any, output: Any) -> Any:
        seen.append(1)
        return None if output is None else output[0] * 0

    _layer(backbone.model).register_forward_hook(Observer(look))
    assert backbone.fingerprint == before
    assert torch.equal(backbone.model(input_ids=QUESTION[None]).logits, plain)
    assert seen == [1]


# -- weights --------------------------------------------------------------------------------------


def _fused_step(model: Any) -> None:
    step = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    versions = {id(p): p._version for p in model.parameters()}
    model(input_ids=QUESTION[None], labels=QUESTION[None]).loss.backward()
    step.step()
    step.zero_grad(set_to_none=True)
    # no counter has moved: this is what the sample of contents is for
    assert versions == {id(p): p._version for p in model.parameters()}


def _through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


@pytest.mark.parametrize("change", [_fused_step, _through_data])
def test_a_write_no_counter_counts_is_noticed(change: Callable[[Any], None]):
    backbone = HfEngine(tiny.build(FAMILY))
    before = backbone.fingerprint
    change(backbone.model)
    after = backbone.fingerprint
    assert after != before
    change(backbone.model)
    assert backbone.fingerprint not in (before, after)


def test_weights_made_in_inference_mode_are_watched():
    with torch.inference_mode():
        model = tiny.build(FAMILY)
    assert model.lm_head.weight.is_inference()
    backbone = HfEngine(model)
    before = backbone.fingerprint
    with torch.inference_mode():
        _layer(model).mlp.up_proj.weight.mul_(1.01)
    after = backbone.fingerprint
    assert after != before
    with torch.inference_mode():
        _layer(model).input_layernorm.weight[7] += 1
    assert backbone.fingerprint not in (before, after)


# -- rotary ---------------------------------------------------------------------------------------


def _written(model: Any) -> None:
    model.model.language_model.rotary_emb.inv_freq.mul_(1.01)


def _written_through_data(model: Any) -> None:
    model.model.language_model.rotary_emb.inv_freq.data[1] *= 1.01


def _replaced(model: Any) -> None:
    inner, config = model.model.language_model, model.config.text_config
    config.rope_parameters = config.rope_parameters | {"rope_theta": 5e3}
    inner.rotary_emb = type(inner.rotary_emb)(config)


@pytest.mark.parametrize("change", [_written, _written_through_data, _replaced])
def test_rotary_angles_changed_on_a_live_model_are_refused(change: Callable[[Any], None]):
    backbone = HfEngine(tiny.build(FAMILY))
    window = make(backbone, None, samples.chunk(backbone, samples.sample(FAMILY)))
    change(backbone.model)
    for use in (lambda: window.slide(1), lambda: make(backbone), lambda: backbone.fingerprint):
        with pytest.raises(ComputationChanged, match=r"rotary angles.*make a new Backbone"):
            use()
    # what was read off the old one serves the old one only; a new one reads anew
    again = HfEngine(backbone.model)
    assert again.layout != backbone.layout
    with pytest.raises(IncompatibleChunk):
        make(again).append(samples.chunk(tiny.backbone(FAMILY), samples.sample(FAMILY)))


@pytest.mark.parametrize("family", ["longrope", "dynamic_ntk"])
def test_frequencies_a_forward_chooses_are_no_change(family: str):
    backbone = HfEngine(tiny.build(family))
    before, rotary = backbone.fingerprint, backbone.decoder.rotary_emb
    assert backbone.limits.below is not None
    ids, stood = samples.text_ids(9)[None], rotary.inv_freq.clone()
    with torch.no_grad():
        near = backbone.model(input_ids=ids).logits
        # past the limit: a user's own, which Kamera refuses
        backbone.model(input_ids=samples.text_ids(backbone.limits.below + 40, seed=3)[None])
        assert not torch.equal(rotary.inv_freq, stood)
        assert backbone.fingerprint == before
        backbone.model.lm_head.weight[0, 0] += 1  # a reason to look at everything again
        assert backbone.fingerprint != before
        backbone.model.lm_head.weight[0, 0] -= 1
        assert torch.allclose(backbone.model(input_ids=ids).logits, near)


def test_dynamic_frequencies_are_bound_until_they_are_chosen():
    backbone = HfEngine(tiny.build("dynamic_ntk"))
    backbone.decoder.rotary_emb.inv_freq.mul_(1.01)
    with pytest.raises(ComputationChanged):
        assert backbone.fingerprint


def test_a_sliding_window_lowered_on_a_live_model_is_noticed():
    backbone = HfEngine(tiny.build("gemma3"))
    chunk = samples.chunk(backbone, samples.sample("gemma3"))
    window, before = make(backbone, None, chunk), backbone.fingerprint
    backbone.model.config.text_config.sliding_window = 2
    assert backbone.fingerprint != before
    with pytest.raises(IncompatibleChunk, match="code, settings, hooks or autocast"):
        window.append(chunk)


# -- autocast -------------------------------------------------------------------------------------


def test_autocast_around_an_append_is_refused():
    backbone = tiny.backbone(FAMILY)
    store = ChunkStore.open("memory://")
    chunks = [samples.chunk(backbone, samples.sample(FAMILY, seed)) for seed in (1, 2)]
    window = make(backbone, store, chunks[0])
    before = backbone.fingerprint
    with torch.autocast("cpu", torch.bfloat16):
        half = backbone.fingerprint
        with pytest.raises(IncompatibleChunk, match="autocast"):
            window.append(chunks[1])
        inner = samples.chunk(backbone, samples.sample(FAMILY, 2))
        make(backbone, store, inner)  # a window of its own may run so
        assert inner.fingerprint == half
    with torch.autocast("cpu", torch.float16):
        assert backbone.fingerprint not in (before, half)
    with torch.autocast("cpu", enabled=False):
        assert backbone.fingerprint == before
    window.append(chunks[1])
    assert len({info.context for info in store.ls("canonical")}) == 2


# -- the same everywhere --------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.of_each_kind((*tiny.FAMILIES, *tiny.LIMITED)))
def test_use_leaves_the_fingerprint_and_two_builds_agree(family: str):
    backbone = tiny.backbone(family)
    before, moves = backbone.fingerprint, backbone.identity.moves
    chunk = samples.chunk(backbone, samples.sample(family))
    spans = backbone.encode(chunk)
    forwards.run(backbone, spans, backbone.positions([chunk.input_ids], [chunk.position_inputs()]))
    with torch.no_grad():
        backbone.model(input_ids=samples.text_ids(9)[None])
    assert (backbone.fingerprint, backbone.identity.moves) == (before, moves)
    assert computation(tiny.build(family)).lines == computation(tiny.build(family)).lines
    assert not computation(backbone.model).unread


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


def test_only_kernels_of_equal_arithmetic_are_one_model():
    backbone = HfEngine(tiny.build(FAMILY))
    before, config = backbone.fingerprint, backbone.model.config.text_config
    config._attn_implementation = "eager"
    assert backbone.fingerprint == before
    config._attn_implementation = "of_my_own"
    assert backbone.fingerprint != before


def test_training_mode_is_another_model():
    backbone = HfEngine(tiny.build(FAMILY))
    before = backbone.fingerprint
    backbone.model.train()
    assert backbone.fingerprint != before
    backbone.model.eval()
    assert backbone.fingerprint == before
