"""A benchmark small enough for tests: the testbed's world, few traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kamera import testbed
from kamera.eval.reuse import Benchmark, draw_items, freeze


def small(folder: Path, count: int = 1, traces: tuple[str, ...] = ("published", "slid")) -> Benchmark:
    """``count`` items of the testbed behind these traces."""
    items = [
        replace(item, traces={name: item.traces[name] for name in traces})
        for item in draw_items("testbed", None, count=count)
    ]
    return freeze(items, folder, system=testbed.SYSTEM, origin={"source": "testbed"})
