"""What tenants have stored, read aside from the scheduler and kept fresh: tables for recognising prompts."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from kamera.engines.vllm.known import KnownPrompts, Least, is_recognisable
from kamera.engines.vllm.stores import Stores
from kamera.errors import KameraError
from kamera.ops import PatchBudget
from kamera.store import Context, ObjectInfo

logger = logging.getLogger(__name__)

_ROWS = 1 << 17
"""Most rows that the tables of all tenants hold together. A table that is made anew holds the newest half."""

_TENANTS = 256
_REST, _SHARE = 0.1, 3.0
"""Seconds between two looks at a tenant's rows, at least, and at least as a multiple of what a look takes."""

_PATIENCE = 0.5
"""Seconds that a prompt waits for a look."""

_FEW = 256
"""New rows that a table takes up; for more it is made again, aside."""


class _Look(NamedTuple):
    """What a look at a store found: a whole new table, or rows that have come since the last look.

    Its ``total`` rows end with the ``last``.
    """

    table: KnownPrompts | None
    rows: list[ObjectInfo]
    total: int
    last: str
    seconds: float = 0.0


@dataclass
class _Tenant:
    """A tenant's table (None: being read), and the ``count`` of its store's rows, up to the ``last`` one."""

    table: KnownPrompts | None = None
    count: int = 0
    last: str = ""
    next_look: float = 0.0
    began: float = 0.0
    future: Future[_Look] | None = None


class PromptTables:
    """The tables of all tenants. One thread uses it; stores are read by others.

    Prompts are served with at least the guarantee ``least``, and if that supplies at least a ``block`` of
    tokens more than vLLM's own prefix cache.
    A store is asked for what is new when a request of its tenant comes and the last look is a while ago. Rows
    that have left are noticed by whoever misses their objects (`forget`).
    """

    def __init__(self, stores: Stores, budget: PatchBudget, least: Least, block: int) -> None:
        self._stores, self._budget = stores, budget
        self.least, self.block = least, block
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="kamera-prompts")

    def of(self, tenant: str) -> KnownPrompts | None:
        """What a tenant has stored; None while its store is looked at, so that a prompt finds the last one's.

        A look that takes long is waited for only if it is the first.
        """
        mine = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        if mine.future is not None and mine.future.done():
            self._take(mine, mine.future.result())
            self._trim()
        if mine.future is None and time.monotonic() >= mine.next_look:
            mine.future = self._pool.submit(self._look, tenant, mine.count, mine.last)
            mine.began = time.monotonic()
        return None if mine.future is not None and time.monotonic() < mine.began + _PATIENCE else mine.table

    def forget(self, context: Context) -> None:
        """Recognise nothing behind an anchor until its rows are read again: one of them was wrong."""
        mine = self._tenants.get(context.tenant)
        if mine is not None and mine.table is not None:
            mine.table.forget(context)
            mine.count, mine.last = 0, ""

    def close(self) -> None:
        """Read no more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- inside --------------------------------------------------------------------------------

    def _take(self, mine: _Tenant, look: _Look) -> None:
        seconds = 0.0 if mine.table is None else look.seconds  # the first look takes longer than any other
        mine.future, mine.next_look = None, time.monotonic() + max(_REST, _SHARE * seconds)
        if look.table is not None:
            mine.table = look.table
        elif not mine.count:
            return  # what was told since it looked needs a table of all rows
        elif mine.table is not None:
            for row in look.rows:
                mine.table.add(row)
        full = mine.table is not None and mine.table.rows > _ROWS
        mine.count, mine.last = (0, "") if full else (look.total, look.last)

    def _trim(self) -> None:
        """Drop the tables of tenants that have been away longest."""
        sizes = {name: t.table.rows for name, t in self._tenants.items() if t.table is not None}
        for name in list(self._tenants)[:-1]:
            if len(self._tenants) <= _TENANTS and sum(sizes.values()) <= _ROWS:
                return
            del self._tenants[name]
            sizes.pop(name, None)

    def _look(self, tenant: str, count: int, last: str) -> _Look:
        """In a thread of its own: the rows behind the ``last`` of ``count``, or a table of all."""
        start = time.perf_counter()
        try:
            with self._stores.open_another(tenant) as store:
                new = store.ls(offset=count - 1) if count else []
                if new and new[0].key == last and len(new) <= _FEW:  # nothing before it has left
                    look = _Look(None, new[1:], count + len(new) - 1, new[-1].key)
                else:
                    look = self._whole(store.ls())
        except KameraError as error:
            logger.warning("stored rows of a tenant were not read: %s", error)
            look = _Look(None if count else KnownPrompts(self._budget), [], count, last)
        return look._replace(seconds=time.perf_counter() - start)

    def _whole(self, rows: list[ObjectInfo]) -> _Look:
        anchors = [row for row in rows if row.kind == "anchor"]
        others = [row for row in rows if row.kind != "anchor" and is_recognisable(row)]
        table = KnownPrompts(self._budget, [*anchors, *others[-_ROWS // 2 :]])
        return _Look(table, [], len(rows), rows[-1].key if rows else "")
