"""What the connector counts for vLLM's own end point of metrics: values, no vLLM."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kamera.engines.recipe import Part


class CountedMetric(NamedTuple):
    """A counter: the name of its one label, and its help."""

    label: str
    help: str


COUNTED = {
    "supplied_tokens": CountedMetric("origin", "Tokens of prompts written into pages, by the KV's origin."),
    "refused_requests": CountedMetric("reason", "Requests that were computed instead, by what did not fit."),
    "harvested_bytes": CountedMetric("kind", "Bytes of the objects made of KV in pages, and stored."),
    "dropped_bytes": CountedMetric("reason", "Bytes of KV in pages that were over the harvest's bound."),
}
"""The metrics by name; vLLM shows them as ``vllm:kamera_NAME_total``."""


class Counts:
    """Counts that were not told yet, by metric and label. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, metric: str, label: str, count: int = 1) -> None:
        """Count something more."""
        with self._lock:
            self._counts[metric, label] += count

    def take(self) -> dict[str, dict[str, int]]:
        """The counts since the last call; empty for none."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        taken: dict[str, dict[str, int]] = {}
        for (metric, label), count in counts.items():
            taken.setdefault(metric, {})[label] = count
        return taken


def merged(*counts: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The sums of what several sides counted."""
    total = Counts()
    for one in counts:
        for metric, label, count in flat(one):
            total.add(metric, label, count)
    return total.take()


def flat(counts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str, int]]:
    """Metric, label and count of each entry."""
    return ((name, label, count) for name, of in counts.items() for label, count in of.items())


def origin_of(part: Part) -> str:
    """Where a supplied part's KV comes from, as `kamera.window.EngineSlot` calls it."""
    if part.patch is None:
        return "canonical"
    return "survivor" if part.guarantee == "survivor" else "stored"
