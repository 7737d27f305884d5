"""Presets have the published shapes, quickly; chunks have the tokens asked for."""

from __future__ import annotations

import pytest
import torch
import transformers

from kamera.engines.hf import describe, forwards
from lab.speed.content import noise_patch, picture_chunk, words
from lab.speed.presets import PRESETS, TINY, preset
from lab.speed.shape import CUT_VOCABULARY, FIRST_WORD

PUBLISHED = {
    # layers, width, heads, KV heads, vision layers: each checkpoint's own config
    "qwen2.5-vl-3b": (36, 2048, 16, 2, 32),
    "qwen2.5-vl-7b": (28, 3584, 28, 4, 32),
    "qwen3-vl-8b": (36, 4096, 32, 8, 27),
    "kimi-vl-a3b": (27, 2048, 16, 16, 27),
    "llava-1.5-7b": (32, 4096, 32, 32, 24),
}
BYTES_PER_TOKEN = {
    # of one layer in bf16: K and V of all KV heads, or the latent and its rotary part
    "qwen2.5-vl-3b": 2 * 2 * 128 * 2,
    "qwen2.5-vl-7b": 2 * 4 * 128 * 2,
    "qwen3-vl-8b": 2 * 8 * 128 * 2,
    "kimi-vl-a3b": (512 + 64) * 2,
    "llava-1.5-7b": 2 * 32 * 128 * 2,
}


@pytest.fixture(scope="module")
def tiny():
    return TINY.build(dtype=torch.float32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers(name):
    shape = preset(name)
    text = shape.text
    found = (
        text["num_hidden_layers"],
        text["hidden_size"],
        text["num_attention_heads"],
        text["num_key_value_heads"],
        shape.vision[shape.depth],
    )
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_takes_every_setting_of_a_preset(name):
    shape = preset(name)
    held = getattr(transformers, f"{shape.model}Config")(**shape.config).to_dict()
    for part in ("text_config", "vision_config"):
        for setting, value in shape.config[part].items():
            if setting != "rope_parameters":
                assert held[part][setting] == value, (part, setting)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_cut_preset_keeps_its_width_and_says_so(name):
    shape = preset(name)
    cut = shape.cut(2)
    assert cut["text_config"]["num_hidden_layers"] == cut["vision_config"][shape.depth] == 2
    assert cut["text_config"]["vocab_size"] == CUT_VOCABULARY
    changed = {"num_hidden_layers", "vocab_size"}
    assert {k: v for k, v in cut["text_config"].items() if k not in changed} == {
        k: v for k, v in shape.text.items() if k not in changed
    }
    for tap in shape.taps:
        assert all(0 <= layer < 2 for layer in cut["vision_config"][tap]) and cut["vision_config"][tap]
    assert shape.cut(None)["text_config"] == dict(shape.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_bytes_per_token(name):
    backbone = preset(name).build(2)
    assert describe(backbone).bytes_per_token == 2 * BYTES_PER_TOKEN[name]
    chunk = picture_chunk(backbone, preset(name), 640)
    kv, _ = forwards.run(
        backbone, backbone.encode(chunk), backbone.positions([chunk.input_ids], [chunk.position_inputs()])
    )
    assert all(torch.isfinite(t).all() for layer in kv for t in layer.values())


def test_equal_seeds_build_equal_models():
    one, two, other = (TINY.build(seed=s, dtype=torch.float32) for s in (0, 0, 1))
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_weights_are_noise_and_rotary_buffers_float32():
    model = TINY.build(dtype=torch.bfloat16).model
    weights = torch.cat([p.float().flatten() for p in model.parameters() if p.dim() >= 2])
    assert weights.std() == pytest.approx(0.02, rel=0.05)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in model.named_buffers() if "inv_freq" in n} == {torch.float32}


@pytest.mark.parametrize("tokens", [1, 3, 4, 64, 257])
def test_a_chunk_has_exactly_the_tokens_asked_for(tiny, tokens):
    chunk = picture_chunk(tiny, TINY, tokens)
    assert chunk.num_tokens == tokens
    assert chunk.has_media == (tokens > 3)
    assert tiny.encode(chunk).num_tokens == tokens


def test_chunks_differ_by_seed_alone(tiny):
    one, two, other = (picture_chunk(tiny, TINY, 64, seed=s) for s in (1, 1, 2))
    assert one.id == two.id != other.id


def test_words_are_no_special_tokens(tiny):
    assert int(words(tiny, 500).min()) >= FIRST_WORD


def test_a_noise_patch_fits_the_budget_and_skips_layer_0(tiny):
    from kamera.ops import kv_bytes

    canonical = forwards.allocate_kv(tiny, 2048)
    for layer in canonical:
        for tensor in layer.values():
            tensor.normal_()
    patch = noise_patch(canonical, tiny.layout)
    assert not patch.layers[0] and patch.layers[1]
    assert patch.nbytes <= max(0.03 * kv_bytes(canonical), 128 * 1024)


def test_an_unknown_preset_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"'gpt-2' is none of .*qwen2\.5-vl-7b"):
        preset("gpt-2")
    assert set(PUBLISHED) | {"tiny"} == set(PRESETS)


def test_layers_that_share_their_weights_have_kv_of_their_own():
    """The depth of the whole in the memory of one layer."""
    apart, shared = (TINY.build(dtype=torch.float32, same_weights=same) for same in (False, True))
    weights = [{p.data_ptr() for p in b.decoder.layers.parameters()} for b in (apart, shared)]
    assert len(weights[0]) == len(apart.layout) * len(weights[1])
    assert shared.facts.bytes_per_token == apart.facts.bytes_per_token
    ids = torch.arange(16, 24)
    kv, _ = forwards.run(
        shared, shared.encode(shared.chunk_from_tensors(ids)), torch.arange(8).expand(shared.axes, -1)
    )
    assert not torch.equal(kv[0]["k"], kv[1]["k"])
