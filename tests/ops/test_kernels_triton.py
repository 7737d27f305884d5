"""The Triton path against float64, run by Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.ops import Blocks, LowRanks, Patch
from kamera.ops.kernels.launches import Writing
from tests.ops.kernel_cases import Case, cases, check, factors, layouts, span, target

pytest.importorskip("triton")

before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
try:
    from kamera.ops.kernels import triton_path
finally:
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before

KNOWN = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.skipif(
    not triton_path.INTERPRETED, reason="triton was imported for a GPU in this process"
)


def write(case: Case, dtype: torch.dtype, across: bool = False):
    buffer, views = target(case, dtype, across)
    given_ = Writing(views, case.source, case.patch, case.layout, tuple(case.offset), case.phased_only)
    assert triton_path.can_write(given_)
    triton_path.write_kv(given_)
    return buffer, views


@settings(max_examples=25)
@given(cases(KNOWN, (0, 1, 5, 67)), st.sampled_from(KNOWN), st.booleans())
def test_the_kernel_rounds_once_and_writes_only_its_target(case, dtype, across):
    buffer, views = write(case, dtype, across)
    # a GPU rounds to the nearest bfloat16, the interpreter cuts
    check(case, buffer, views, ulps=1.0 if dtype == torch.bfloat16 else 0.5)


def test_one_launch_serves_all_layers_of_a_shape(monkeypatch):
    layout = layouts("half", 3)["gqa"][1:] * 4
    case = Case(
        layout,
        span(layout, 4, torch.float32),
        factors(layout, 4, 3, torch.float32),
        (5, 6, 7),
        False,
        torch.float32,
        4,
    )
    grids = []
    kernel = triton_path.serve_kernel

    class Counting:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_path, "serve_kernel", Counting())
    buffer, views = write(case, torch.float32)
    assert sorted(grids) == [(1, 2, 8), (1, 2, 8)]  # keys and values, eight layers each
    check(case, buffer, views)


def test_factors_of_one_token_may_be_views_of_wider_ones():
    layout = layouts("half", 1)["partial"]
    case = Case(
        layout,
        span(layout, 1, torch.float32),
        factors(layout, 1, 4, torch.float32),
        (3,),
        False,
        torch.float32,
        1,
    )
    parts = []
    for block in case.patch.blocks.parts:
        wide = {
            n: torch.cat([f.left, torch.ones(1, 12)], dim=1)[:, : f.left.shape[1]] for n, f in block.items()
        }
        parts.append({n: LowRanks(wide[n], f.right, f.ranks) for n, f in block.items()})
    case = replace(case, patch=Patch(Blocks(parts, case.patch.blocks.groups)))
    buffer, views = write(case, torch.float32)
    check(case, buffer, views)
