"""Prometheus metrics of a store, on request; `docs/operations.md` lists those to watch.

Nothing is counted without a `Metrics`, and no label holds an id, a text or a path below the store's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from kamera.errors import CorruptChunk, ForeignObject, KameraError, StoreError, StoreVersionError, WrongKey
from kamera.store.info import StoreStats
from kamera.store.records import Record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

MISSES = ("absent", "corrupt", "foreign", "wrong_key", "newer_format", "remote_dead", "failed")
"""Reasons for a miss. ``remote_dead``: the object may be in the remote, which does not answer."""

_REFUSALS: dict[type[KameraError], str] = {
    ForeignObject: "foreign",
    CorruptChunk: "corrupt",
    WrongKey: "wrong_key",
    StoreVersionError: "newer_format",
}
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Watched(Protocol):
    """An open store."""

    def _stats(self) -> StoreStats: ...


class Silent:
    """Counts nothing: the default of a store that is not given a `Metrics`. Times are in seconds."""

    def hit(self, record: Record, seconds: float) -> None:
        """Count a look-up that found ``record``."""

    def missed(self, seconds: float, remote_down: bool) -> None:
        """Count a look-up that found nothing."""

    def refused(self, error: KameraError, seconds: float) -> None:
        """Count a look-up that raised ``error``."""

    def asked(self, there: bool, remote_down: bool) -> None:
        """Count a question whether an object is there; nothing was read."""

    def wrote(self, seconds: float) -> None:
        """Count a write."""

    def served(self, guarantee: str, computed: bool, new: bool = False) -> None:
        """Count a chunk placed in a window with this guarantee; ``computed``: by a forward.

        ``new``: the chunk was never seen before, so nothing could have been stored.
        """

    def audited(self, holds: bool) -> None:
        """Count a served slot that was audited; ``holds``: its KV was within its guarantee's bound."""

    def watch(self, store: Watched) -> None:
        """Report ``store``'s tiers too, as long as it is open."""


class Metrics(Silent):
    """Counters and histograms in a Prometheus registry (default: the global one).

    One may be given to several stores. Raises `StoreError` without ``prometheus-client``
    (``kamera[metrics]``), `ValueError` for a registry that has Kamera's metrics already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise StoreError("metrics need prometheus-client: pip install 'kamera[metrics]'") from None
        registry = prometheus.REGISTRY if registry is None else registry
        counter, histogram = prometheus.Counter, prometheus.Histogram
        self._served = counter(
            "kamera_chunks_served",
            "Chunks that came to a place in a window, by guarantee: from a copy, or by a forward there",
            ["guarantee", "source"],
            registry=registry,
        )
        self._audits = counter(
            "kamera_audits",
            "Served slots that were prefilled again and compared, by what was found",
            ["found"],
            registry=registry,
        )
        self._hits = counter(
            "kamera_store_hits", "Objects found and verified, by kind", ["kind"], registry=registry
        )
        self._misses = counter(
            "kamera_store_misses", "Look-ups with nothing to serve, by reason", ["reason"], registry=registry
        )
        self._asked = counter(
            "kamera_store_asked",
            "Questions whether an object is there, by answer",
            ["answer"],
            registry=registry,
        )
        self._refusals = counter(
            "kamera_store_integrity_refusals",
            "Objects that were there and refused, by reason",
            ["reason"],
            registry=registry,
        )
        self._get = histogram(
            "kamera_store_get_seconds", "Look-ups", ["outcome"], buckets=_SECONDS, registry=registry
        )
        self._put = histogram("kamera_store_put_seconds", "Writes", buckets=_SECONDS, registry=registry)
        for reason in MISSES:  # a rate needs a zero to start from
            self._misses.labels(reason)
        for reason in _REFUSALS.values():
            self._refusals.labels(reason)
        for found in ("right", "wrong"):
            self._audits.labels(found)
        self._tiers = _Tiers()
        collector: Any = self._tiers  # their type is a base class, whose import would need the extra
        registry.register(collector)

    def hit(self, record: Record, seconds: float) -> None:
        """See `Silent`."""
        self._hits.labels(record.kind).inc()
        self._get.labels("hit").observe(seconds)

    def missed(self, seconds: float, remote_down: bool) -> None:
        """See `Silent`."""
        self._miss("remote_dead" if remote_down else "absent", seconds)

    def refused(self, error: KameraError, seconds: float) -> None:
        """See `Silent`."""
        reason = next((name for kind, name in _REFUSALS.items() if isinstance(error, kind)), None)
        if reason is not None:
            self._refusals.labels(reason).inc()
        self._miss(reason or "failed", seconds)

    def asked(self, there: bool, remote_down: bool) -> None:
        """See `Silent`."""
        self._asked.labels("there" if there else "remote_dead" if remote_down else "absent").inc()

    def wrote(self, seconds: float) -> None:
        """See `Silent`."""
        self._put.observe(seconds)

    def served(self, guarantee: str, computed: bool, new: bool = False) -> None:
        """See `Silent`."""
        self._served.labels(guarantee, "new" if new else "forward" if computed else "copy").inc()

    def audited(self, holds: bool) -> None:
        """See `Silent`."""
        self._audits.labels("right" if holds else "wrong").inc()

    def watch(self, store: Watched) -> None:
        """See `Silent`."""
        self._tiers.watch(store)

    def _miss(self, reason: str, seconds: float) -> None:
        self._misses.labels(reason).inc()
        self._get.labels("miss").observe(seconds)


class _Tiers:
    """Collects the counts of the open stores at every scrape."""

    def __init__(self) -> None:
        self._stores: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()

    def watch(self, store: Watched) -> None:
        with self._lock:
            self._stores.add(store)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        size = GaugeMetricFamily("kamera_store_bytes", "Bytes held", labels=["store", "tier"])
        objects = GaugeMetricFamily("kamera_store_objects", "Objects held", labels=["store", "tier"])
        memory = CounterMetricFamily(
            "kamera_store_memory", "What became of look-ups in memory", labels=["store", "event"]
        )
        remote = CounterMetricFamily("kamera_remote", "What became of the remote", labels=["store", "event"])
        up = GaugeMetricFamily(
            "kamera_remote_up", "1: it answers, 0: it is left alone", labels=["store", "direction"]
        )
        pending = GaugeMetricFamily(
            "kamera_remote_pending_uploads", "Objects that wait to be sent", labels=["store"]
        )
        for stats in self._stats():
            url = stats.url
            held = stats.memory
            size.add_metric([url, "memory"], held.bytes)
            objects.add_metric([url, "memory"], held.objects)
            for event in ("hits", "misses", "evictions"):
                memory.add_metric([url, event], getattr(held, event))
            if stats.directory:
                size.add_metric([url, "disk"], stats.bytes)
                objects.add_metric([url, "disk"], stats.objects)
            far = stats.remote
            if far is not None:
                for event in ("calls", "failures", "skipped", "hits", "misses", "refused", "stored"):
                    remote.add_metric([url, event], getattr(far, event))
                for direction in ("reads", "writes"):
                    up.add_metric([url, direction], float(getattr(far, direction) == "closed"))
                pending.add_metric([url], far.pending)
        yield from (size, objects, memory, remote, up, pending)

    def _stats(self) -> Iterator[StoreStats]:
        with self._lock:
            stores = list(self._stores)
        for store in stores:
            try:
                yield store._stats()
            except StoreError:  # closed, or its disk is away: the other stores are reported all the same
                continue
