"""What a window computes while another thread loads a model: torch's default dtype is then that model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kamera import KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from tests.models import samples, tiny
from tests.window.rig import Snapshot, make

FAMILY = "qwen2_5_vl"
POLICIES = {
    "patched": ReusePolicy(rank=8, forms="always"),
    "by default": ReusePolicy(),
}


@contextmanager
def loading(dtype: torch.dtype) -> Iterator[None]:
    """As inside of transformers' ``from_pretrained``, for every thread of the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_the_facts_of_a_model_are_the_same_while_another_one_is_loaded():
    backbone = HfEngine(tiny.build(FAMILY).requires_grad_(False))
    before = backbone.fingerprint
    with loading(torch.bfloat16):
        weight = backbone.model.lm_head.weight
        kept = weight[0, 0].clone()
        weight[0, 0] = 3.0
        backbone.refresh()
        assert backbone.fingerprint != before
        weight[0, 0] = kept
        backbone.refresh()
        assert backbone.fingerprint == before
        again = HfEngine(backbone.model)
        assert again.layout == backbone.layout and again.fingerprint == before
    assert again.fingerprint == backbone.fingerprint == before


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_window_computes_the_same_while_another_model_is_loaded(policy):
    model = tiny.build(FAMILY)
    contents = [samples.sample(FAMILY, seed) for seed in range(3)]

    def built() -> KameraWindow:
        backbone = HfEngine(model)
        chunks = [samples.chunk(backbone, content) for content in contents]
        window = make(backbone, None, *chunks, policy=policy)
        window.slide()
        window.flush()
        window.recall(chunks[0].id)
        return window

    wanted = Snapshot.of(built())
    with loading(torch.bfloat16):
        window = built()
        assert wanted.matches(window, numbers=False)
