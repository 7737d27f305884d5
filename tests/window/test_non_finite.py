"""NaN and infinities never become KV that is kept or served, whatever they came from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine, forwards
from kamera.errors import NonFiniteKV, UnsupportedBackbone
from kamera.ops import form_patch, kv_copy, kv_of, patch_of
from kamera.ops.finite import all_finite
from kamera.window import former_of
from tests.models import processors, samples, tiny
from tests.window.rig import Snapshot, inventory, make

OVERFLOWS = 77
"""A token whose keys leave float16 in the first layer."""


def half(dtype: torch.dtype = torch.float16) -> HfEngine:
    """A model in which one token's keys overflow float16, and no other's."""
    model: Any = tiny.build("qwen2_5_vl")
    inner = model.model.language_model
    with torch.no_grad():
        inner.embed_tokens.weight[:, 0] = 0.0
        inner.embed_tokens.weight[OVERFLOWS] = 0.0
        inner.embed_tokens.weight[OVERFLOWS, 0] = 1.0
        inner.layers[0].input_layernorm.weight[0] = 1.0
        inner.layers[0].self_attn.k_proj.weight[:, 0] = 3e4
    return HfEngine(model.to(dtype))


def assert_refused(window, call, match: str = "not finite") -> str:
    before, held = Snapshot.of(window), inventory(former_of(window).store)
    with pytest.raises(NonFiniteKV, match=match) as caught:
        call()
    assert before.matches(window)
    assert inventory(former_of(window).store) == held
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize("archive", ["now", "later"])
def test_pixels_that_are_not_finite_are_refused(bad, leading, archive):
    backbone, given = tiny.backbone("qwen2_5_vl"), samples.sample("qwen2_5_vl")
    window = make(backbone, None, *([] if leading else [backbone.chunk_from_tensors([5, 6, 7])]))
    pixels = given.vision_inputs["pixel_values"].clone()
    pixels[3, 5] = bad
    inputs = given.vision_inputs | {"pixel_values": pixels}
    chunk = backbone.chunk_from_tensors(given.input_ids, **inputs)
    said = assert_refused(window, lambda: window.append(chunk, archive=archive))
    assert chunk.id[:12] in said
    assert "pixels" in said


def test_a_processor_that_divides_by_zero_is_refused():
    processor = processors.picture_processor()
    processor.image_processor.image_std = [0.0, 0.0, 0.0]
    backbone = HfEngine(processors.matching_model(), processor)
    window = make(backbone)
    assert_refused(window, lambda: window.append(np.zeros((16, 16, 3), np.uint8)))


@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize("archive", ["now", "later"])
def test_an_overflow_of_float16_is_refused(leading, archive):
    backbone = half()
    window = make(backbone, None, *([] if leading else [backbone.chunk_from_tensors([5, 6, 7])]))
    bad = backbone.chunk_from_tensors([9, OVERFLOWS, 10])
    said = assert_refused(window, lambda: window.append(bad, archive=archive))
    assert "layer 0, channel k, token 1 of 3, float16" in said
    assert "bfloat16" in said
    window.append(backbone.chunk_from_tensors([9, 10, 11]))  # and goes on


def test_the_same_model_in_float32_serves_it():
    backbone = half(torch.float32)
    window = make(backbone, None, backbone.chunk_from_tensors([5, 6]))
    assert window.append(backbone.chunk_from_tensors([9, OVERFLOWS, 10])).slot.guarantee == "exact"


def test_a_system_prompt_that_overflows_is_refused():
    with pytest.raises(NonFiniteKV, match="token 2 of 3"):
        from kamera import KameraWindow

        KameraWindow(half(), ChunkStore.open("memory://"), [5, 6, OVERFLOWS])


def test_a_batch_with_one_row_that_overflows_is_refused():
    backbone = half()
    spans = [backbone.encode(backbone.chunk_from_tensors(ids)) for ids in ([5, 6, 7], [9, OVERFLOWS, 10])]
    places = [backbone.positions([s.input_ids], [{}]) for s in spans]
    with pytest.raises(NonFiniteKV):
        backbone.prefill(spans, places, apart=True)


def test_a_model_whose_every_forward_overflows_is_refused():
    model: Any = tiny.build("qwen2_5_vl").half()
    with torch.no_grad():
        model.model.language_model.layers[1].self_attn.k_proj.weight.mul_(1e6)
    with pytest.raises(UnsupportedBackbone, match="not finite"):
        HfEngine(model)


@pytest.mark.parametrize(
    "policy", [ReusePolicy(minimum="exact"), ReusePolicy(on_miss="prefill", forms="always")]
)
def test_no_policy_serves_it(policy):
    backbone = half()
    window = make(backbone, None, backbone.chunk_from_tensors([5, 6, 7]), policy=policy)
    assert_refused(window, lambda: window.append(backbone.chunk_from_tensors([OVERFLOWS])))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("tokens", [6, 200])
def test_a_deficit_that_is_not_finite_has_no_patch(bad, rank, tokens):
    delta = torch.randn(tokens, 130, generator=torch.Generator().manual_seed(0))
    delta[4, 1] = bad
    with pytest.raises(NonFiniteKV, match="deficit"):
        patch_of(kv_of([{"v": delta}]), rank, torch.float32)


def test_conditioned_kv_that_is_not_finite_has_no_patch():
    backbone = tiny.backbone("qwen2_5_vl")
    encoded = backbone.encode(backbone.chunk_from_tensors([5, 6, 7]))
    kv, _ = forwards.run(backbone, encoded, backbone.positions([encoded.input_ids], [{}]))
    poisoned = kv_copy(kv)
    poisoned[1]["v"][0, 1, 2] = math.nan
    with pytest.raises(NonFiniteKV):
        form_patch(poisoned, kv, backbone.layout, (0, 0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_finite_is_every_entry_and_nothing_else(dtype):
    largest = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite([largest, torch.arange(4), torch.empty(0, dtype=dtype)])
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = largest.clone()
        spoiled[2, 3] = bad
        assert not all_finite([largest, spoiled])
    both = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert not all_finite([both])
