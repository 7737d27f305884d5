"""A model whose forward depends on how its tokens are cut is served without reuse, by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from kamera import ChatSession, ChunkStore, KameraWindow
from kamera.engines.hf import HfEngine
from kamera.errors import UnsupportedBackbone
from tests.content.templates import TALK
from tests.models import processors, tiny

GREEDY = {"max_new_tokens": 3, "do_sample": False}


def int8(model: nn.Module) -> Any:
    """Linear modules in int8, with one scale for all activations of a call."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


class PerToken(nn.Linear):
    """Activations in 8 bits, with a scale for each token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / scale).round() * scale)


class PerCall(PerToken):
    """Activations in 8 bits, with a scale for all tokens of a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax().clamp_min(1e-9) / 127
        return nn.Linear.forward(self, (x / scale).round() * scale)


def _as(model: nn.Module, kind: type[nn.Linear], where: str) -> nn.Module:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and where in name:
            module.__class__ = kind
    return model


def _whole(family: str, dtype: torch.dtype) -> nn.Module:
    return int8(tiny.build(family))


def _tower(family: str, dtype: torch.dtype) -> nn.Module:
    model = tiny.build(family)
    model.model.vision_tower = int8(model.model.vision_tower)
    return model


def _mlps(family: str, dtype: torch.dtype) -> nn.Module:
    return _as(tiny.build(family, dtype), PerCall, "language_model.layers.1.mlp")


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [_whole, _tower, _mlps], ids=["whole", "tower", "one MLP"])
def test_scales_of_a_whole_call_are_found_wherever_they_are(build, dtype, caplog):
    with caplog.at_level(logging.WARNING, "kamera"):
        backbone = HfEngine(build("llava", dtype))
    assert "depends on how its tokens are cut" in backbone.facts.no_reuse
    assert backbone.facts.no_reuse in caplog.text
    with pytest.raises(UnsupportedBackbone, match="no KV of it can be used again"):
        KameraWindow(backbone, ChunkStore.open("memory://"), torch.tensor([5, 6]))


def test_a_session_answers_by_the_plain_model_and_says_why():
    model = int8(processors.matching_model())
    backbone = HfEngine(model, processors.picture_processor())
    store = ChunkStore.open("memory://")
    with pytest.raises(UnsupportedBackbone, match="depends on how its tokens are cut"):
        ChatSession(backbone, store).send(TALK[:1], **GREEDY)
    session = ChatSession(backbone, store, uncached=True)
    turn = session.send(TALK[:1], **GREEDY)
    inputs = session._conversations.whole(TALK[:1], tools=None)
    with torch.no_grad():
        plain = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    assert turn.text == backbone.builder.detokenize(plain)
    assert turn.report.uncached.startswith("UnsupportedBackbone: the forward of this Qwen2_5_VL")
    assert store.ls() == []
