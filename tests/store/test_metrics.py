"""What is counted is what happened; without metrics nothing is, and prometheus-client is not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kamera.store import ChunkStore
from kamera.store.metrics import Metrics
from tests.store.builders import CONTEXT, canonical, patch

prometheus = pytest.importorskip("prometheus_client")

CHUNK = "c" * 64


@pytest.fixture
def registry():
    return prometheus.CollectorRegistry()


@pytest.fixture
def store(tmp_path: Path, registry):
    with ChunkStore.open(tmp_path / "s", memory_limit=100_000, metrics=Metrics(registry)) as opened:
        yield opened


def misses(registry) -> dict[str, float]:
    """Reasons that were met, and how often."""
    (family,) = [f for f in registry.collect() if f.name == "kamera_store_misses"]
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


def test_hits_are_counted_by_kind_and_misses_by_reason(store, registry) -> None:
    assert store.get_canonical(CONTEXT, CHUNK) is None
    store.put(canonical())
    store.put(patch())
    for _ in range(3):
        store.get_canonical(CONTEXT, CHUNK)
    store.get_patch(CONTEXT, CHUNK, ("x", "y"))
    store.get_patch(CONTEXT, CHUNK, ("y", "x"))
    assert registry.get_sample_value("kamera_store_hits_total", {"kind": "canonical"}) == 3
    assert registry.get_sample_value("kamera_store_hits_total", {"kind": "exact"}) == 1
    assert misses(registry) == {"absent": 2}
    assert registry.get_sample_value("kamera_store_get_seconds_count", {"outcome": "hit"}) == 4
    assert registry.get_sample_value("kamera_store_get_seconds_count", {"outcome": "miss"}) == 2
    assert registry.get_sample_value("kamera_store_put_seconds_count") == 2


def test_a_store_without_metrics_needs_no_prometheus(tmp_path) -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from kamera.store import ChunkStore\n"
        "from kamera.store.metrics import Metrics\n"
        f"ChunkStore.open({str(tmp_path / 's')!r}).close()\n"
        "try: Metrics()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "StoreError metrics need prometheus-client: pip install 'kamera-kv[metrics]'\n"
