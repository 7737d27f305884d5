"""Audits: a share of what was served is prefilled again in the background, and what is wrong is counted."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from prometheus_client import CollectorRegistry

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.ops import kv_map
from kamera.store.metrics import Metrics
from tests.window.rig import QUESTION, SYSTEM, borne, pictures, rig, watching

ALL = ReusePolicy(audit=1.0, rank=64, patch_bytes=None)


def audited(store: ChunkStore, registry: CollectorRegistry) -> dict[str, float]:
    return {
        found: registry.get_sample_value("kamera_audits_total", {"found": found}) or 0.0
        for found in ("right", "wrong")
    }


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_right_kv_is_counted_as_right_and_all_that_runs_is_told(family):
    backbone, (a, b, c, _) = rig(family)
    registry = CollectorRegistry()
    store = ChunkStore.open("memory://", metrics=Metrics(registry))
    with watching(backbone, later=True) as seen:
        window = KameraWindow(backbone, store, SYSTEM, policy=ALL)
        for chunk in (a, b, c):
            window.append(chunk)
        window.flush()
        window.reorder([1, 0, 2])
        window.flush()
        window.slide()
        window.next_token_logits(QUESTION)
        window.flush()
    assert borne(seen, window.usage())
    counts = audited(store, registry)
    assert counts["wrong"] == 0.0 and counts["right"] >= 5.0


def test_wrong_kv_is_counted_and_logged_and_nothing_is_withheld(caplog):
    backbone, _ = rig("qwen2_5_vl")
    a, b = pictures(backbone, "qwen2_5_vl", 2)
    registry = CollectorRegistry()
    sound, store = ChunkStore.open("memory://"), ChunkStore.open("memory://", metrics=Metrics(registry))
    first = KameraWindow(backbone, sound, SYSTEM)
    first.append(a)
    first.flush()
    (row,) = sound.ls("canonical")
    record = sound.get_canonical(row.context, row.chunk_id)
    store.put(dataclasses.replace(record, kv=kv_map(record.kv, lambda tensor: tensor * 1.1)))
    window = KameraWindow(backbone, store, SYSTEM, policy=ALL)
    with caplog.at_level(logging.ERROR):
        assert window.append(a).forwards == 0
        window.flush()
    assert audited(store, registry)["wrong"] == 1.0
    assert any("is off by" in record.getMessage() for record in caplog.records)
    assert window.append(b).slot.guarantee == "exact" and window.recall(a.id, move=True).forwards <= 1
