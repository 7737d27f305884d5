"""Every `rearrange` of the product gives the very tensor that a reshape and a transpose give."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange

import kamera

FORMULAS: dict[str, tuple[tuple[int, ...], dict[str, int], Any]] = {
    "(heads dim) rank -> rank heads dim": ((15, 2), {"heads": 3}, lambda x: x.T.reshape(2, 3, 5)),
    "(heads dim) rank -> heads rank dim": (
        (15, 2),
        {"heads": 3},
        lambda x: x.T.reshape(2, 3, 5).transpose(0, 1),
    ),
    "rank heads dim -> rank (heads dim)": ((2, 3, 5), {}, lambda x: x.reshape(2, 15)),
    "tokens (heads dim) -> heads tokens dim": (
        (7, 15),
        {"heads": 3},
        lambda x: x.reshape(7, 3, 5).transpose(0, 1),
    ),
    "layers heads tokens dim -> layers tokens (heads dim)": (
        (2, 3, 7, 5),
        {},
        lambda x: x.transpose(1, 2).flatten(2),
    ),
    "... pairs pair dim -> ... (pairs pair) dim": ((4, 3, 13, 2, 5), {}, lambda x: x.flatten(2, 3)),
    "rows pairs pair -> rows (pairs pair)": ((11, 13, 2), {}, lambda x: x.flatten(1)),
    "channels rows rank -> rows (channels rank)": (
        (4, 11, 2),
        {},
        lambda x: x.transpose(0, 1).reshape(11, 8),
    ),
    "rows (channels held) -> channels rows held": (
        (11, 12),
        {"channels": 4},
        lambda x: x.reshape(11, 4, 3).transpose(0, 1),
    ),
    "rows (channels rank) -> channels rows rank": (
        (11, 8),
        {"channels": 4},
        lambda x: x.reshape(11, 4, 2).transpose(0, 1),
    ),
}
"""By pattern: an odd shape, the sizes that `rearrange` is told, and the formula without einops."""


def test_every_pattern_of_the_product_has_its_formula_here():
    found = set()
    for path in Path(kamera.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "rearrange":
                found.add(ast.literal_eval(node.args[1]))
    assert found == set(FORMULAS)


@pytest.mark.parametrize("pattern", FORMULAS)
@pytest.mark.parametrize("strided", [False, True])
def test_a_pattern_gives_what_its_formula_gives(pattern, strided):
    shape, told, formula = FORMULAS[pattern]
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    if strided:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    new, old = rearrange(x, pattern, **told), formula(x)
    assert new.shape == old.shape and torch.equal(new, old)
    assert new.stride() == old.stride()  # what is multiplied with it then rounds alike, too
