"""What the connector counts for vLLM's own end point of metrics: values, no vLLM."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from kamera.engines.recipe import Part, Recipe

COUNTED = {
    "supplied_tokens": ("origin", "Tokens of prompts written into pages, by the KV's origin."),
    "refused_requests": ("reason", "Requests that were computed instead, by what did not fit."),
    "harvested_bytes": ("kind", "Bytes of the objects made of KV in pages, and stored."),
    "dropped_bytes": ("reason", "Bytes of KV in pages that were over the harvest's bound."),
}
"""The metrics by name, each with its one label and its help; ``vllm:kamera_NAME_total`` in vLLM."""


class Counts:
    """Counts since the start, by ``METRIC/LABEL``, and those that were not told yet. Thread-safe."""

    def __init__(self) -> None:
        self.all: Counter[str] = Counter()
        self._last: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, metric: str, label: str, count: int = 1) -> None:
        """Count something more."""
        with self._lock:
            self.all[f"{metric}/{label}"] += count

    def of(self, metric: str) -> int:
        """What a metric has counted since the start, under any label."""
        with self._lock:
            return sum(count for name, count in self.all.items() if name.startswith(f"{metric}/"))

    def take(self) -> dict[str, int]:
        """The counts since the last call; empty for none."""
        with self._lock:
            new, self._last = self.all - self._last, self.all.copy()
        return dict(new)


def origins(recipe: Recipe, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Where tokens ``start`` up to ``stop`` of a recipe come from: an origin and a number of tokens each."""
    ranges = [("anchor", 0, len(recipe.anchor_ids))]
    ranges += [(_origin(part), part.start, part.stop) for part in recipe.parts]
    each = ((origin, min(end, stop) - max(begin, start)) for origin, begin, end in ranges)
    return ((origin, tokens) for origin, tokens in each if tokens > 0)


def _origin(part: Part) -> str:
    """As `kamera.window.Slot` calls it; "near" for a recognised chunk that did not know all before it."""
    if part.patch is None and (part.kv is None or part.kv.kind == "canonical"):
        return "canonical"
    return part.guarantee if part.guarantee in ("survivor", "near") else "stored"
