"""Hooks of others on the model: one that counts changes nothing, one that steers makes a model of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from tests.models import samples, tiny
from tests.window.rig import QUESTION, make

FAMILY = "qwen2_5_vl"
EXACT = ReusePolicy.exact()
DOUBLE = "lambda module, args, output: output * 2"


def pictures(backbone: Any, count: int = 2) -> list[Any]:
    return [samples.chunk(backbone, samples.sample(FAMILY, seed), f"p{seed}") for seed in range(count)]


def counting(model: Any) -> tuple[Counter[str], list[Any]]:
    """Plain hooks on every module, as a profiler has them."""
    seen: Counter[str] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: seen.update([name]))
        for name, module in model.named_modules()
    ]
    return seen, handles


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before its Backbone", "after it", "in a window's life", "for all modules"])
def test_a_hook_that_counts_serves_and_shares_its_store(when, tmp_path):
    plain, store = HfEngine(tiny.build(FAMILY)), ChunkStore.open(tmp_path / "store")
    make(plain, store, *pictures(plain), policy=EXACT).flush()
    model = tiny.build(FAMILY)
    seen = counting(model)[0] if when == "before its Backbone" else Counter()
    backbone = Backbone(model)
    if when == "after it":
        seen, _ = counting(model)
    window = make(backbone.engine, store, policy=EXACT)
    if when == "for all modules":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.update(["any"]))
    elif when == "in a window's life":
        seen, _ = counting(model)
    try:
        reports = [window.append(chunk) for chunk in pictures(backbone.engine)]
        assert backbone.fingerprint == plain.fingerprint
        assert [report.vision_encodes for report in reports] == [0, 0]
        assert reports[0].forwards == 0, "its canonical is stored"
        window.next_token_logits(QUESTION)
        window.slide(1)
    finally:
        if when == "for all modules":
            handle.remove()
    assert seen.total() > 0
    assert {info.context.fingerprint for info in store.ls("canonical")} == {plain.fingerprint}


# -- hooks that steer ------------------------------------------------------------------------------


def steer(module: Any, by: float = 2.0) -> Any:
    return module.register_forward_hook(lambda module, args, output: output * by)


def test_what_a_steered_model_stores_is_private_to_its_process(tmp_path, caplog):
    store, models = ChunkStore.open(tmp_path / "store"), [tiny.build(FAMILY) for _ in range(2)]
    for model in models:
        steer(model.model.language_model.layers[1].mlp)
    backbones = [HfEngine(model) for model in models]
    assert "what it stores is private to this process" in caplog.text
    assert len({*(b.fingerprint for b in backbones), tiny.backbone(FAMILY).fingerprint}) == 3
    for backbone in backbones:
        window = make(backbone, store, *pictures(backbone), policy=EXACT)
        assert window.append(samples.chunk(backbone, samples.sample(FAMILY, 7))).forwards == 1
        window.flush()
    again = make(backbones[0], store, policy=EXACT)
    assert again.append(pictures(backbones[0])[0]).forwards == 0, "its own objects serve it"


STORE = f"""
import sys, torch
from kamera import Backbone, ChunkStore
from tests.models import tiny
from tests.window.rig import make
from tests.window.test_hooks import EXACT, pictures
model = tiny.build({FAMILY!r})
model.model.language_model.layers[1].mlp.register_forward_hook({DOUBLE})
backbone = Backbone(model, variant="doubled").engine
with ChunkStore.open(sys.argv[1]) as store:
    make(backbone, store, *pictures(backbone), policy=EXACT).flush()
"""


@pytest.mark.slow
def test_a_named_variant_is_shared_between_processes(tmp_path):
    folder = tmp_path / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", STORE, str(folder)], check=True, env=environment)
    store = ChunkStore.open(folder)
    for variant, forwards in (("doubled", 0), ("", 1), ("tripled", 1)):
        model = tiny.build(FAMILY)
        model.model.language_model.layers[1].mlp.register_forward_hook(eval(DOUBLE))
        backbone = Backbone(model, variant=variant)
        report = make(backbone.engine, store, policy=EXACT).append(pictures(backbone.engine)[0])
        assert report.forwards == forwards, variant
        assert any("variant doubled" in note for note in report.notes) is bool(forwards)


# -- how they are tried ----------------------------------------------------------------------------
