"""NaN and infinities never become KV that is kept or served, whatever they came from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kamera import ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import NonFiniteKV
from kamera.window import former_of
from tests.models import samples, tiny
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


@pytest.mark.few(10)
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


@pytest.mark.few(3)
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


def test_a_batch_with_one_row_that_overflows_is_refused():
    backbone = half()
    spans = [backbone.encode(backbone.chunk_from_tensors(ids)) for ids in ([5, 6, 7], [9, OVERFLOWS, 10])]
    places = [backbone.positions([s.input_ids], [{}]) for s in spans]
    with pytest.raises(NonFiniteKV):
        backbone.prefill(spans, places, apart=True)


@pytest.mark.parametrize(
    "policy", [ReusePolicy(minimum="exact"), ReusePolicy(on_miss="prefill", forms="always")]
)
def test_no_policy_serves_it(policy):
    backbone = half()
    window = make(backbone, None, backbone.chunk_from_tensors([5, 6, 7]), policy=policy)
    assert_refused(window, lambda: window.append(backbone.chunk_from_tensors([OVERFLOWS])))
