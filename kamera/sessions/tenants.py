"""What the tenants of a pool have, each its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kamera import forks
from kamera.engines import Completes, Engine
from kamera.errors import quote
from kamera.sessions.anchors import SYSTEM_PROMPTS, Anchors, conversations_of
from kamera.sessions.branches import Branches
from kamera.sessions.engine_turns import anchors_over
from kamera.sessions.owners import Stores
from kamera.sessions.telling import Telling, Traces
from kamera.store import ChunkStore


class Tenants(dict[str, Anchors]):
    """What a pool's tenants have, by tenant; that of one that is asked for is opened. Thread-safe.

    ``stores``, ``traces`` and ``branches`` as for `SessionPool`, ``windows`` as for `Anchors`. Raises
    ValueError for a store of another tenant.
    """

    def __init__(
        self,
        backbone: Engine,
        stores: Stores,
        traces: Traces | None,
        branches: dict[str, Branches] | None,
        engine: Completes | None,
        windows: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._backbone, self._stores, self._traces, self._engine = backbone, stores, traces, engine
        self._branches = {} if branches is None else branches
        self._windows = {**windows, "conversations": conversations_of(backbone), "held": SYSTEM_PROMPTS}
        self._lock = forks.Lock()

    def __missing__(self, tenant: str) -> Anchors:
        store = self._stores if isinstance(self._stores, ChunkStore) else self._stores(tenant)
        if store.tenant != tenant:
            raise ValueError(
                f"the store for tenant {quote(tenant)} is of {quote(store.tenant)}: open one of its own"
            )
        listener = None if self._traces is None else Telling(self._traces, tenant)
        branches = self._branches.setdefault(tenant, Branches())
        own = {"branches": branches, "listener": listener}
        made = anchors_over(self._engine, self._backbone, store, **self._windows, **own)
        with self._lock:
            return self.setdefault(tenant, made)
