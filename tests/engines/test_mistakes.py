"""Wrong arguments of a backbone: one line with the value and the way out, before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kamera import Backbone
from kamera.engines.hf import HfEngine
from tests.compile.saved import vision_model


def refused(call) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("given", [nn.Linear, None, "Qwen/Qwen2.5-VL-3B-Instruct", 7])
def test_what_is_no_module_is_named(given):
    assert "Backbone takes a loaded model, not" in refused(lambda: HfEngine(given))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("FP32", torch.float32),
        ("double", torch.float64),
        (torch.float16, torch.float16),
        ("auto", torch.float32),
    ],
)
def test_a_dtype_has_its_usual_names(name, dtype):
    assert next(Backbone.from_pretrained(vision_model(), dtype=name).engine.model.parameters()).dtype == dtype


@pytest.mark.parametrize("dtype", ["int4", "bf17", "", 16, None, "int8", torch.int64])
def test_another_dtype_is_named(dtype):
    says = refused(lambda: Backbone.from_pretrained("/no/such/model", dtype=dtype).engine)
    assert says.startswith(
        f"dtype {dtype!r} is none of auto, bfloat16 (bf16), float16 (fp16), float32 (fp32)"
    )


@pytest.mark.parametrize("device", ["tpu", "gpu", "cuda:99", "", 3.5, "cpu:x"])
def test_a_device_that_is_not_here_is_named(device):
    says = refused(lambda: Backbone.from_pretrained("/no/such/model", device=device).engine)
    assert says.startswith(f"device {device!r} cannot be used here: ")
