"""Probing, refusing, counting, sharing: what a backbone does around a prefill."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from kamera.engines.hf import Backbone, HfEngine, describe, forwards, prove_patch, prove_relocation
from kamera.errors import NotRelocatable, UnsupportedBackbone
from kamera.ops import kv_slice, layer_groups
from tests.engines.compare import encoded, positions, relative, text, worst
from tests.models import samples, tiny
from tests.models.hooks import hooked
from tests.models.tiny import FAMILIES, LIMIT, LIMITED, backbone, build

ONE = "pppppppp"
# attention family, pairing, axis of every pair, features that carry phase (facts, section 1)
FACTS = {
    "qwen2_vl": ("GQA", "half", "tthhhwww", 16),
    "qwen2_5_vl": ("GQA", "half", "tthhhwww", 16),
    "qwen2_5_omni": ("GQA", "half", "tthhhwww", 16),
    "qwen3_vl": ("GQA", "half", "thwthwtt", 16),
    "qwen3_vl_moe": ("GQA", "half", "thwthwtt", 16),
    "qwen3_omni": ("GQA", "half", "thwthwtt", 16),
    "glm4v": ("GQA", "interleaved", "thww", 8),
    "glm46v": ("GQA", "interleaved", "thww", 8),
    "paddleocr_vl": ("GQA", "half", "tthhhwww", 16),
    "ernie": ("GQA", "interleaved", "hwhwhwtt", 16),
    "kimi_k25": ("MLA", "half", "pppp", 8),
    "deepseek_v2": ("MLA", "interleaved", "pppp", 8),
    "deepseek_v3": ("MLA", "half", "pppp", 8),
    "deepseek_v3_noint": ("MLA", "half", "pppp", 8),
    "deepseek_v3_yarn": ("MLA", "half", "pppp", 8),
    "deepseek_v32": ("MLA", "half", "pppp", 8),
    "minicpm3": ("MLA", "half", "pppp", 8),
    "mistral4": ("MLA", "half", "pppp", 8),
    "deepseek_vl": ("MHA", "half", ONE, 16),
    "llama_mqa": ("MQA", "half", ONE, 16),
    "unknown": ("GQA", "interleaved", ONE, 16),
    **{
        name: ("GQA", "half", ONE, 16)
        for name in (
            *("llava", "llava_llama3", "llava_yarn", "llava_onevision", "smolvlm", "idefics3", "internvl"),
            *("video_llama_3", "mistral3", "gemma3", "gemma4", "gemma4_shared", "gemma4_vl"),
            *("mistral_sliding", "dynamic_ntk", "longrope", "ministral3"),
        )
    },
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*FAMILIES, *LIMITED])
def test_the_probe_reads_off_what_the_family_is(name):
    d = describe(backbone(name))
    assert (d.family, d.pairing, d.axis_order, d.rotary_dim) == FACTS[name]
    assert d.takes_pixels == (name in samples.PICTURED)


def test_gemmas_layer_types_have_frequencies_of_their_own():
    ropes = [spec.channels[0].rope for spec in backbone("gemma4").layout]
    assert ropes[0] == ropes[2] != ropes[1] == ropes[3]
    assert 0.0 in ropes[1].inv_freq


REASONS = {
    "qwen3_5": "hybrid: 3 of 4 layers keep .*LinearAttentionLayer",
    "mllama": r"cross-attention \(layers \[1, 3\]\)",
    "llama4": "chunks at fixed absolute positions",
    "gpt2": "no decoder stack with a rotary module",
    "t5": "encoder-decoder",
    "unknown_absolute": "moving keys does not equal a prefill",
    "unknown_decaying_values": "moving keys does not equal a prefill",
    "unknown_other_rotation": "layer 0 channel k|moving keys does not equal a prefill",
}


@pytest.mark.parametrize("name", tiny.REFUSED)
def test_state_other_than_relocatable_kv_is_refused_by_reason(name):
    with pytest.raises(UnsupportedBackbone, match=REASONS[name]):
        HfEngine(build(name))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dynamic_ntk", "dynamic NTK"),
        ("longrope", "longrope switches"),
        ("ministral3", "position bucket"),
        ("mistral4", "position bucket"),
    ],
)
def test_positions_past_the_limit_are_refused_with_the_reason(name, reason):
    b = backbone(name)
    span, last = text(4), torch.arange(LIMIT - 4, LIMIT)[None]
    forwards.run(b, span, last)
    _, cache = forwards.run(b, span, last - 100)
    for run in (
        lambda: forwards.run(b, span, last + 1),
        lambda: forwards.forward(b, span.input_ids, last + 1, cache),
        lambda: b.limits.check_tokens(last + 1),
    ):
        with pytest.raises(NotRelocatable, match=f"position {LIMIT} .*{LIMIT}: .*{reason}"):
            run()
    assert describe(b).position_limit == LIMIT


def test_proofs_hold_on_every_layout_and_name_what_fails():
    for name in ("qwen3_vl", "deepseek_v32", "gemma4_shared", "glm4v"):
        b = backbone(name)
        for proof in (prove_relocation(b), prove_patch(b), prove_relocation(b, encoded(b, name))):
            assert proof.holds
            assert proof.error <= 1e-4
    b = HfEngine(build("llava"))
    k, v = b.layout[0].channels
    wrong = replace(k, rope=replace(k.rope, pairing="interleaved"))
    b.layout = (replace(b.layout[0], channels=(wrong, v)), *b.layout[1:])
    b.groups = layer_groups(b.layout, ["cpu"] * len(b.layout))
    proof = prove_relocation(b)
    assert not proof.holds
    assert proof.worst == "layer 0 channel k"


@pytest.mark.few(5)
@pytest.mark.parametrize("name", samples.PICTURED)
def test_the_meter_counts_what_the_modules_run(name):
    b = backbone(name)
    towers = [m for n, m in b.model.named_modules() if "patch_embed" in n.split(".")[-1]][:1] or [
        m for n, m in b.model.named_modules() if n.endswith("patch_conv")
    ]
    assert towers, [n for n, _ in b.model.named_modules()][:20]
    seen = {"vision": 0, "layer": 0}

    def count(kind):
        return lambda *_: seen.__setitem__(kind, seen[kind] + 1)

    hooks = [(towers[0].register_forward_hook, count("vision"))]
    hooks.append((b.decoder.layers[0].register_forward_hook, count("layer")))
    with hooked(b, *hooks), b.measure() as work:
        span = encoded(b, name)
        assert (work.forwards, work.vision_encodes) == (0, 1)
        plain = b.encode(b.chunk_from_tensors(samples.text_ids(3)))
        first, second = positions(b, span, plain)
        with b.measure() as inner:
            _, cache = forwards.run(b, span, first)
        forwards.run(b, plain, second, cache)
    assert (work.forwards, work.vision_encodes) == (seen["layer"], seen["vision"]) == (2, 1)
    assert work.tokens == span.num_tokens + 3
    assert (inner.forwards, inner.tokens, inner.vision_encodes) == (1, span.num_tokens, 0)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "deepseek_v32", "gemma4_shared", "gemma3"])
def test_a_shared_cache_leaves_the_original_as_it_was(name):
    b = backbone(name)
    span, more = text(12), text(5, seed=1)
    first, second = positions(b, span, more)
    kv, cache = forwards.run(b, span, first)
    before = [{n: t.clone() for n, t in layer.items()} for layer in kv]
    shared, again = forwards.make_cache(b, [kv]), forwards.make_cache(b, [kv])
    one = forwards.forward(b, more.input_ids, second, shared)
    assert cache.get_seq_length() == 12
    assert shared.get_seq_length() == 17
    two = forwards.forward(b, more.input_ids, second, again)
    assert torch.equal(one, two)
    assert worst(kv, before) == 0
    assembled = forwards.make_cache(b, [kv_slice(kv, 0, 5), kv_slice(kv, 5, 12)])
    assert relative(forwards.forward(b, more.input_ids, second, assembled), one) <= 1e-5
    assert forwards.make_cache(b, []).get_seq_length() == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "deepseek_v2", "gemma3", "ernie", "gemma4_vl"])
def test_eager_and_sdpa_agree_and_masks_are_never_boolean(name):
    """A boolean mask is silently added as 0 and 1 by eager attention."""
    model = build(name)
    model.set_attn_implementation("eager")
    eager, sdpa = HfEngine(model), backbone(name)
    kinds = set()

    def look(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        if mask is not None:
            kinds.add(mask.dtype)

    for layer in eager.decoder.layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    caches = []
    for b in (eager, sdpa):
        spans = [encoded(b, name, seed) for seed in (1, 2)]
        cache = None
        for span, place in zip(spans, positions(b, *spans), strict=True):
            kv, cache = forwards.run(b, span, place, cache)
        caches.append(kv)
    assert worst(*caches) <= (5e-5 if name.startswith("gemma4") else 1e-5)
    assert kinds == {torch.float32}


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_a_model_placed_by_device_map_gives_the_same_kv(tmp_path):
    model = build("qwen2_5_vl")
    model.save_pretrained(tmp_path)
    whole = HfEngine(model)
    placed = Backbone.from_pretrained(tmp_path, device_map="cpu", dtype="float32").engine
    span = encoded(whole, "qwen2_5_vl")
    (place,) = positions(whole, span)
    assert worst(forwards.run(placed, span, place)[0], forwards.run(whole, span, place)[0]) == 0
    assert placed.fingerprint == whole.fingerprint
