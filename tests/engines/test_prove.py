"""Proofs run the kernels that serve, hold every layer in every precision, and name what fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera.certify.sabotage import SABOTAGES, Material
from kamera.engines.hf import HfEngine, probe, prove_moves, prove_patch, prove_relocation
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, Blocks, Patch
from kamera.ops.kernels import native_path, torch_path
from lab.sabotage.builds import builds, replaced
from tests.models import tiny

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
PROOFS = (prove_relocation, prove_patch, prove_moves)
LAST = 2
"""The last layer of the tiny models."""


def apart(kv: KV) -> KV:
    """Each layer a block of its own: views."""
    rows = [(group, row) for group, layers in enumerate(kv.groups) for row in range(len(layers))]
    parts = [{n: t[row : row + 1] for n, t in kv.parts[group].items()} for group, row in rows]
    return Blocks(parts, tuple((kv.groups[group][row],) for group, row in rows))


def turned_otherwise_in(layer: int):
    """Kernels that turn the keys of one layer by another theta."""

    def wrong(write):
        def served(given):
            none, layout = Patch.of([{} for _ in given.layout], given.into.groups), given.layout
            whole = Material(given.source, none, layout, given.offset, none, none, seed=0)
            of = whole.under(SABOTAGES["wrong theta"])
            mixed = [of.layout[i] if i == layer else spec for i, spec in enumerate(layout)]
            here, held = apart(given.into), apart(given.source)
            low = None if given.patch is None else given.patch.regroup(here.groups)
            write(given._replace(into=here, source=held, patch=low, layout=mixed))

        return served

    return (replaced(path, "write_kv", wrong(path.write_kv)) for path in (native_path, torch_path))


@pytest.mark.parametrize("name", ["qwen3_vl", "deepseek_v3", "gemma4_shared", "qwen3_vl_moe"])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_proofs_hold_in_every_precision(name, dtype):
    backbone = HfEngine(tiny.build(name, dtype))
    proofs = [prove(backbone) for prove in PROOFS]
    assert all(proof.holds for proof in proofs), proofs


@pytest.mark.parametrize("prove", [prove_relocation, prove_moves])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_kernels_that_turn_the_last_layer_otherwise_are_found_out(dtype, prove):
    backbone = HfEngine(tiny.build("llama_mqa", dtype))
    one, two = turned_otherwise_in(LAST)
    with one, two:
        proof = prove(backbone)
    assert not proof.holds
    assert proof.worst == f"layer {LAST} channel k"


def test_a_layout_that_is_wrong_in_a_deep_layer_alone_is_refused_in_half_precision():
    probed = probe.probe_layout

    def wrong(*given):
        layout = probed(*given)
        k, v = layout[LAST].channels
        turned = replace(k, rope=replace(k.rope, pairing="interleaved"))
        return [*layout[:LAST], replace(layout[LAST], channels=(turned, v))]

    refused = pytest.raises(UnsupportedBackbone, match=f"in layer {LAST} channel k")
    with replaced(probe, "probe_layout", wrong), refused:
        HfEngine(tiny.build("llama_mqa", torch.bfloat16))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_patch_that_the_kernels_do_not_serve_is_found_out(dtype):
    backbone = HfEngine(tiny.build("qwen2_5_vl", dtype))
    of = builds(backbone)
    for name in ("layers exchanged", "layer dropped", "patch scaled", "K not patched", "V not patched"):
        with of[f"{name}, in the kernels"]():
            assert not prove_patch(backbone).holds, name


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_moves_of_the_live_cache_are_proved_too(dtype):
    backbone = HfEngine(tiny.build("qwen2_5_vl", dtype))
    of = builds(backbone)
    moves = ("keys do not turn where they stand", "a moved span comes one token late")
    for name in (*moves, "a moved span leaves its free channels"):
        with of[name]():
            assert not prove_moves(backbone).holds, name
    assert prove_moves(backbone).holds
