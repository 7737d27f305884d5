"""The stores of a connector: one a tenant, opened when first asked for."""

from __future__ import annotations

import threading
from typing import Any

from kamera.store import ChunkStore, is_remote


class Stores:
    """Stores at one place. Safe to use from several threads.

    ``url`` and ``options`` are those of `ChunkStore.open`. A tenant is the ``cache_salt`` of a request, ""
    for a request without one.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self._options = options
        self._open: dict[str, ChunkStore] = {}
        self._lock = threading.Lock()

    @property
    def remote(self) -> bool:
        """True if a look-up may wait for a network."""
        return is_remote(self.url)

    def of(self, tenant: str) -> ChunkStore:
        """The store of a tenant. Raises as `ChunkStore.open`."""
        with self._lock:
            if tenant not in self._open:
                self._open[tenant] = self.open_another(tenant)
            return self._open[tenant]

    def open_another(self, tenant: str) -> ChunkStore:
        """A store of a tenant for one look, to be closed by the caller: it may hold nothing of them."""
        return ChunkStore.open(self.url, tenant=tenant, **self._options)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            for store in self._open.values():
                store.close()
            self._open.clear()
