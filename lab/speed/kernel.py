"""What a call of the fused operator costs on a GPU: its kernels alone, and the time to launch them.

`lab.speed.apply` times whole calls, in which a short chunk's kernels are a small part. Here the profiler says
how long the kernels ran, so that they stand beside those of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from kamera.engines.hf import forwards
from kamera.ops import Patch, kv_bytes, kv_slice
from kamera.ops.kernels import serve
from lab.speed.apply import CONTEXT
from lab.speed.content import noise_kv, noise_patch
from lab.speed.presets import preset
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.table import Result, Row, Section, model_facts, result

CALLS = 50
"""Calls of a way; medians of them are reported, and the mean of the kernels."""


def run(settings: Settings, step: Step = unwatched) -> Result:
    """One row per length and way. Raises ValueError without a GPU."""
    if torch.device(settings.device).type != "cuda":
        raise ValueError(f"device {settings.device!r} launches no kernels: give --device cuda")
    shape = preset(settings.preset)
    backbone = settings.build(shape)
    layout, rows = backbone.layout, list[Row]()
    for done, length in enumerate(settings.lengths):
        step(done, len(settings.lengths))
        canonical = noise_kv(backbone, length, seed=2)
        slot = kv_slice(forwards.allocate_kv(backbone, CONTEXT + length), CONTEXT, CONTEXT + length)
        offset = [CONTEXT] * backbone.axes
        source = torch.ones(kv_bytes(canonical), dtype=torch.uint8, device=settings.device)
        into = torch.zeros_like(source)

        def served(patch: Patch | None) -> Callable[[], object]:
            return lambda: serve(slot, canonical, patch, layout, offset)  # noqa: B023

        ways = {
            "copy": lambda: into.copy_(source),  # noqa: B023
            "blind": served(None),
            "patched": served(noise_patch(canonical, layout)),
        }
        found = {name: _row(way) for name, way in ways.items()}
        copy = found["copy"]["kernels us"]
        for name, row in found.items():
            rows.append({"tokens": length, "way": name, **row, "share of copy": copy / row["kernels us"]})
    step(len(settings.lengths), len(settings.lengths))
    notes = (
        "kernels: on the device, by the profiler; host: until the call returns; wall: until the device ends",
        "share of copy: of the kernels of a plain copy of the same KV, the patch's own bytes not counted",
    )
    section = Section("Kernels of a chunk into its slot", tuple(rows))
    return result("kernel", settings, model_facts(shape, backbone), [section], notes)


def _row(way: Callable[[], object]) -> dict[str, float]:
    way()  # compiles what has to be
    host, wall = [], []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        began = perf_counter()
        way()
        host.append(perf_counter() - began)
        torch.cuda.synchronize()
        wall.append(perf_counter() - began)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            way()
        torch.cuda.synchronize()
    on_device = sum(e.self_device_time_total for e in seen.key_averages() if e.device_type.name == "CUDA")
    return {
        "kernels us": on_device / CALLS,
        "host us": 1e6 * median(host),
        "wall us": 1e6 * median(wall),
    }
