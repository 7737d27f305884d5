"""Prometheus metrics of a store, on request; `docs/operations.md` lists those to watch.

Nothing is counted without a `Metrics`, and no label holds an id, a text or a path below the store's.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from kamera.errors import CorruptChunk, ForeignObject, KameraError, StoreError, StoreVersionError, WrongKey
from kamera.store.info import StoreStats
from kamera.store.records import Record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

Found = TypeVar("Found")
Done = TypeVar("Done")
Watched = TypeVar("Watched")

MISSES = ("absent", "corrupt", "foreign", "wrong_key", "newer_format", "remote_dead", "failed")
"""Reasons for a miss. ``remote_dead``: the object may be in the remote, which does not answer."""

_REFUSALS: dict[type[KameraError], str] = {
    ForeignObject: "foreign",
    CorruptChunk: "corrupt",
    WrongKey: "wrong_key",
    StoreVersionError: "newer_format",
}
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Silent:
    """Counts nothing: the default of a store that is not given a `Metrics`."""

    def lookup(self, get: Callable[[], Record | None], remote_down: Callable[[], bool]) -> Record | None:
        """The outcome of ``get`` (None: a miss), counted and timed."""
        return get()

    def asked(self, look: Callable[[], Found], remote_down: Callable[[], bool]) -> Found:
        """The outcome of ``look`` (falsy: the object is absent), counted; nothing was read."""
        return look()

    def write(self, put: Callable[[], Done]) -> Done:
        """The outcome of ``put``, timed."""
        return put()

    def served(self, guarantee: str, computed: bool, new: bool = False) -> None:
        """Count a chunk placed in a window with this guarantee; ``computed``: by a forward.

        ``new``: the chunk was never seen before, so nothing could have been stored.
        """

    def audited(self, holds: bool) -> None:
        """Count a served slot that was audited; ``holds``: its KV was within its guarantee's bound."""

    def watch(self, store: Watched, stats: Callable[[Watched], StoreStats]) -> None:
        """Report ``store``'s tiers too, by ``stats``, as long as it is open."""


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

    def lookup(self, get: Callable[[], Record | None], remote_down: Callable[[], bool]) -> Record | None:
        """See `Silent`."""
        start = time.perf_counter()
        try:
            found = get()
        except KameraError as error:
            reason = next((name for kind, name in _REFUSALS.items() if isinstance(error, kind)), None)
            if reason is not None:
                self._refusals.labels(reason).inc()
            self._missed(reason or "failed", start)
            raise
        if found is None:
            self._missed("remote_dead" if remote_down() else "absent", start)
        else:
            self._hits.labels(found.kind).inc()
            self._get.labels("hit").observe(time.perf_counter() - start)
        return found

    def asked(self, look: Callable[[], Found], remote_down: Callable[[], bool]) -> Found:
        """See `Silent`."""
        found = look()
        self._asked.labels("there" if found else "remote_dead" if remote_down() else "absent").inc()
        return found

    def write(self, put: Callable[[], Done]) -> Done:
        """See `Silent`."""
        with self._put.time():
            return put()

    def served(self, guarantee: str, computed: bool, new: bool = False) -> None:
        """See `Silent`."""
        self._served.labels(guarantee, "new" if new else "forward" if computed else "copy").inc()

    def audited(self, holds: bool) -> None:
        """See `Silent`."""
        self._audits.labels("right" if holds else "wrong").inc()

    def watch(self, store: Watched, stats: Callable[[Watched], StoreStats]) -> None:
        """See `Silent`."""
        self._tiers.watch(store, stats)

    def _missed(self, reason: str, start: float) -> None:
        self._misses.labels(reason).inc()
        self._get.labels("miss").observe(time.perf_counter() - start)


class _Tiers:
    """Collects the counts of the open stores at every scrape."""

    def __init__(self) -> None:
        self._stores: weakref.WeakKeyDictionary[Any, Callable[[Any], StoreStats]]
        self._stores = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def watch(self, store: Watched, stats: Callable[[Watched], StoreStats]) -> None:
        with self._lock:
            self._stores[store] = stats

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
            stores = list(self._stores.items())
        for store, stats in stores:
            try:
                yield stats(store)
            except StoreError:  # closed, or its disk is away: the other stores are reported all the same
                continue
