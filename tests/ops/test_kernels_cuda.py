"""The Triton path beyond the interpreter: it compiles for GPUs, and serves on one where there is one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from kamera.ops import kv_map
from kamera.ops.kernels import serve
from tests.ops.kernel_cases import cases, check, target

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kamera.ops.kernels.triton_kernel import serve_kernel as kernel

names = kernel.arg_names
common = dict(
    DIM=96, START=0, PAIRS=32, INTERLEAVED=False, BITS=0, TOKEN_GROUP=1, FEATURE_GROUP=1, PLAIN=False,
    FACTOR_BITS=0, PARTS=2, BLOCK_T=64, BLOCK_P=32, BLOCK_D=32, BLOCK_R=32, WIDEN=False, PRECISION="tf32x3",
    EVEN=True,
)
pointers = {n: "*bf16" for n in ("source", "steps", "lows", "target", "left", "right")}
pointers |= {n: "*fp32" for n in ("left_scales", "right_scales", "cos", "sin")}
pointers |= {"columns": "*i32", "largest": "fp32"}
variants = [
    (80, {}, {}),
    (90, {"source": "*u8", "left": "*fp32", "right": "*fp32"}, dict(BITS=4, TOKEN_GROUP=32)),
    (90, {"left": "*i8", "right": "*i8"}, dict(FACTOR_BITS=8)),
    (90, {"left": "*u8", "right": "*u8"}, dict(FACTOR_BITS=4, PARTS=3)),
    (90, {}, dict(INTERLEAVED=True, START=32, BLOCK_R=0)),
    (90, {}, dict(PAIRS=0, PLAIN=True, BLOCK_R=0)),
]
for chip, held, changes in variants:
    constants = common | changes
    signature = {n: "constexpr" if n in constants else "i32" for n in names} | pointers | held
    source = ASTSource(
        kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", chip, 32)).asm["ptx"]
    print(chip, constants["BLOCK_R"] > 0, "mma" in ptx)
"""


def test_the_kernel_compiles_for_gpus_with_matrix_units():
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split("\n")[:-1] == [
        "80 True True",
        "90 True True",
        "90 True True",
        "90 True True",
        "90 False False",
        "90 False False",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@settings(max_examples=25)
@given(cases((torch.float32, torch.float16, torch.bfloat16), (1, 5, 67, 300)))
def test_a_gpu_is_served_by_triton_one_rounding_from_float64(case):
    buffer, views = target(case, case.dtype, device="cuda")
    path = serve(views, case.source, case.patch, case.layout, case.offset, phased_only=case.phased_only)
    assert path == "triton" or not case.written()
    check(case, kv_map(buffer, torch.Tensor.cpu), kv_map(views, torch.Tensor.cpu))
