"""Counts of a store, and their Prometheus metrics on request; `docs/stores.md` lists those to watch.

No label holds an id, a text or a path below the store's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kamera.errors import CorruptChunk, ForeignObject, KameraError, StoreError, StoreVersionError, WrongKey

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from kamera.store.store import ChunkStore, StoreStats

_REFUSALS: dict[type[KameraError], str] = {
    ForeignObject: "foreign",
    CorruptChunk: "corrupt",
    WrongKey: "wrong_key",
    StoreVersionError: "newer_format",
}
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SUMS: dict[str, tuple[str, list[str]]] = {
    "kamera_chunks_served": ("Chunks that came to a place in a window", ["guarantee", "source"]),
    "kamera_audits": ("Served slots that were prefilled again and compared", ["found"]),
    "kamera_store_hits": ("Objects found and verified", ["kind"]),
    "kamera_store_misses": ("Look-ups with nothing to serve", ["reason"]),
    "kamera_store_asked": ("Questions whether an object is there", ["answer"]),
    "kamera_store_integrity_refusals": ("Objects that were there and refused", ["reason"]),
}
"""What is counted: its description and labels."""
_TIMES: dict[str, tuple[str, list[str]]] = {
    "kamera_store_get_seconds": ("Look-ups", ["outcome"]),
    "kamera_store_put_seconds": ("Writes", []),
}
_ZEROS = [  # a rate needs a zero to start from
    *(("kamera_store_misses", why) for why in ("absent", "remote_dead", "failed", *_REFUSALS.values())),
    *(("kamera_store_integrity_refusals", why) for why in _REFUSALS.values()),
    *(("kamera_audits", verdict) for verdict in ("right", "wrong")),
]


class Metrics:
    """Counts of what happens in stores, in a Prometheus registry (default: the global one).

    Safe to use from several threads. One may be given to several stores; their tiers are asked at each
    scrape. Raises `StoreError` without ``prometheus-client`` (``kamera-kv[metrics]``), `ValueError` for a
    registry that has Kamera's already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise StoreError("metrics need prometheus-client: pip install 'kamera-kv[metrics]'") from None
        self._lock = threading.Lock()
        self._stores: weakref.WeakSet[ChunkStore] = weakref.WeakSet()
        self._sums = {name: prometheus.Counter(name, *texts, registry=None) for name, texts in _SUMS.items()}
        self._times = {
            name: prometheus.Histogram(name, *texts, registry=None, buckets=_SECONDS)
            for name, texts in _TIMES.items()
        }
        for metric, why in _ZEROS:
            self._sums[metric].labels(why)
        collector: Any = self  # their type is a base class, whose import would need the extra
        (prometheus.REGISTRY if registry is None else registry).register(collector)

    def count(self, metric: str, *labels: str) -> None:
        """Count one event."""
        self._sums[metric].labels(*labels).inc()

    def time(self, metric: str, seconds: float, *labels: str) -> None:
        """Count one event that took this long."""
        histogram = self._times[metric]
        (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def watch(self, store: ChunkStore) -> None:
        """Report ``store``'s tiers too, as long as it is open."""
        with self._lock:
            self._stores.add(store)

    def count_miss(self, seconds: float, remote_down: bool, error: KameraError | None = None) -> None:
        """Count a look-up that found nothing to serve, or raised ``error``."""
        why = "remote_dead" if remote_down else "absent"
        if error is not None:
            refusal = next((name for kind, name in _REFUSALS.items() if isinstance(error, kind)), None)
            why = refusal or "failed"
            if refusal is not None:
                self.count("kamera_store_integrity_refusals", refusal)
        self.count("kamera_store_misses", why)
        self.time("kamera_store_get_seconds", seconds, "miss")

    def count_served(self, guarantee: str, computed: bool, new: bool = False) -> None:
        """Count a chunk placed with this guarantee, by a forward if ``computed``; ``new``: never seen."""
        self.count("kamera_chunks_served", guarantee, "new" if new else "forward" if computed else "copy")

    def collect(self) -> Iterator[Metric]:
        """The counters, and the state of the stores, for Prometheus."""
        from prometheus_client import core

        for metric in (*self._sums.values(), *self._times.values()):
            yield from metric.collect()
        with self._lock:
            stores = list(self._stores)
        size = core.GaugeMetricFamily("kamera_store_bytes", "Bytes held", labels=["store", "tier"])
        objects = core.GaugeMetricFamily("kamera_store_objects", "Objects held", labels=["store", "tier"])
        memory = core.CounterMetricFamily("kamera_store_memory", "Look-ups", labels=["store", "event"])
        remote = core.CounterMetricFamily("kamera_remote", "Calls", labels=["store", "event"])
        up = core.GaugeMetricFamily("kamera_remote_up", "1: it answers", labels=["store", "direction"])
        uploads = core.GaugeMetricFamily("kamera_remote_pending_uploads", "To be sent", labels=["store"])
        for stats in filter(None, map(_of, stores)):
            url, memory_use, remote_use = stats.url, stats.memory, stats.remote
            tiers = [("memory", memory_use.bytes, memory_use.objects), ("disk", stats.bytes, stats.objects)]
            for tier, amount, number in tiers if stats.directory else tiers[:1]:
                size.add_metric([url, tier], amount)
                objects.add_metric([url, tier], number)
            for event in ("hits", "misses", "evictions"):
                memory.add_metric([url, event], getattr(memory_use, event))
            if remote_use is not None:
                for event in ("calls", "failures", "skipped", "hits", "misses", "refused", "stored"):
                    remote.add_metric([url, event], getattr(remote_use, event))
                for direction in ("reads", "writes"):
                    up.add_metric([url, direction], float(getattr(remote_use, direction) == "closed"))
                uploads.add_metric([url], remote_use.pending)
        yield from (size, objects, memory, remote, up, uploads)


def _of(store: ChunkStore) -> StoreStats | None:
    try:
        return store._stats()
    except StoreError:  # closed, or its disk is away: the other stores are reported all the same
        return None
