"""The connector's counts in vLLM's log, and at its end point of metrics. Only vLLM's processes import it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kamera.engines.vllm.counts import COUNTED


class ConnectorStats(KVConnectorStats):
    """`Counts.take` on its way from a worker or the scheduler; ``data`` is what it gave."""

    data: dict[str, int]

    def reset(self) -> None:
        """Count from zero."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The sum of both."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: a number a metric and label."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The counters ``vllm:kamera_NAME_total``: vLLM forgets names that begin so when it starts again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kamera_{name}", documentation=help_text, labelnames=[*self._labelnames, label]
            )
            for name, (label, help_text) in COUNTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine counted."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            name, _, label = key.partition("/")
            counter = self._counters[name]
            assert isinstance(counter, prometheus_client.Counter)
            counter.labels(*engine, label).inc(count)
