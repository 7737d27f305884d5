"""Products of bfloat16 by the float32 path are those of the bfloat16 path."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lab.products import WideSums

ULP = 2.0**-7
"""Distance of neighbouring bfloat16 numbers, relative: two roundings of near sums differ by one of them."""


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_exact_one_rounded(bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 96, bias=bias).to(torch.bfloat16)
    x = torch.randn(3, 40, 128).to(torch.bfloat16)
    exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.no_grad():
        native = layer(x)
        with WideSums():
            made = layer(x)
    assert made.dtype is torch.bfloat16
    error = (made.double() - exact).abs() / exact.abs().clamp_min(1e-2)
    assert error.max() <= ULP / 2 * 1.01
    assert ((native.double() - exact).abs() / exact.abs().clamp_min(1e-2)).max() <= ULP
    assert (made != native).float().mean() < 0.02


def test_other_dtypes_and_operators_are_left_alone() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(20, 64), torch.randn(32, 64)
    narrow = x.to(torch.bfloat16)
    apart = functional.linear(x, w), narrow @ narrow.T, narrow.double() @ w.double().T
    with WideSums():
        there = functional.linear(x, w), narrow @ narrow.T, functional.linear(narrow.double(), w.double())
    for one, other in zip(apart, there, strict=True):
        assert torch.equal(one, other)
