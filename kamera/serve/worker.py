"""Threads that answer requests, and the queue before them, in which tenants take turns.

Answers that run at once share the model's forwards (`kamera.engines.hf.answering`); each has its own thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kamera.engines import WorkCancelled, cancel_when
from kamera.serve.refusal import Refusal, refusal_of

Result = TypeVar("Result")

TIMEOUT, AT_ONCE = 600.0, 16
"""Seconds that a request may take, its wait included; requests that run at once."""


@dataclass(eq=False)
class Job(Generic[Result]):
    """Work for a thread of the worker. The loop that makes it hears texts, then one result or a refusal."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[str | Refusal | tuple[Result]] = asyncio.Queue()
        self._cancelled = False
        self._until = time.monotonic() + TIMEOUT

    def work(self) -> Result:
        """What the worker runs."""
        raise NotImplementedError

    def tell(self, text: str) -> None:
        """Tell the loop a piece of the answer. Raises Refusal if nobody waits, or it has taken too long."""
        if self._is_over():
            raise self._refusal()
        if text:
            self._put(text)

    def run(self) -> None:
        """`work`, and tell the loop. It ends between two layers of a forward once nobody waits for it."""
        try:
            self.tell("")
            with cancel_when(self._is_over):
                self._put((self.work(),))
        except WorkCancelled:
            self._put(self._refusal())
        except BaseException as error:
            self._put(refusal_of(error))

    async def next(self) -> str | tuple[Result]:
        """The next piece of text, or the result. Raises Refusal."""
        heard = await self._heard.get()
        if isinstance(heard, Refusal):
            raise heard
        return heard

    def cancel(self) -> None:
        """End soon: nobody waits any more, and `next` raises. To be called by the loop."""
        self._cancelled = True
        self._heard.put_nowait(Refusal(499, "the client went away"))

    def _is_over(self) -> bool:
        return self._cancelled or time.monotonic() > self._until

    def _refusal(self) -> Refusal:
        if self._cancelled:
            return Refusal(499, "the client went away")
        return Refusal(504, f"no answer within {TIMEOUT:.0f} s: ask for fewer tokens, or later")

    def _put(self, what: str | Refusal | tuple[Result]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, what)
        except RuntimeError:  # the loop is closed
            self._cancelled = True


class Worker:
    """Runs jobs, ``at_once`` of them in threads of their own; of tenants that wait each gets its turn.

    The next job is of the tenant of whom the fewest run, among equals of the one whose turn was longest ago.
    A tenant runs one job less than ``at_once``, so that another one's never waits behind all of them. Of jobs
    that do not begin at once ``most`` may wait, and half of them of one tenant while others wait, too.
    """

    def __init__(self, most: int, at_once: int = AT_ONCE) -> None:
        self._most, self._at_once = most, at_once
        self._queues: OrderedDict[str, deque[Job[Any]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closing = False
        self._threads = ThreadPoolExecutor(at_once, "kamera-serve")
        self._done = Counter[str]()

    def submit(self, tenant: str, job: Job[Any]) -> None:
        """Let a job run. Raises Refusal if too many wait, or the server is stopping."""
        with self._changed:
            if self._closing:
                raise Refusal(503, "the server is stopping: ask another", wait=10)
            mine, waiting = len(self._queues.get(tenant, ())), self.waiting
            full = waiting >= self._most or (mine < waiting and mine >= max(1, self._most // 2))
            if full and not self._has_place(tenant):
                raise Refusal(429, f"{waiting} requests wait: try again later", wait=1 + waiting // 4)
            self._queues.setdefault(tenant, deque()).append(job)
            self._begin()

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return sum(map(len, self._queues.values()))

    @property
    def done(self) -> int:
        """Jobs that have ended."""
        return self._done.total()

    def counts(self, tenant: str) -> dict[str, int]:
        """A tenant's jobs that wait, and those that have ended."""
        return {"waiting": len(self._queues.get(tenant, ())), "answered": self._done[tenant]}

    def close(self) -> None:
        """Run what waits, then end."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._running.total())
        self._threads.shutdown()

    def _has_place(self, tenant: str) -> bool:
        """True if a job of the tenant may begin; then none of its jobs waits."""
        most = max(1, self._at_once - 1)
        return self._running.total() < self._at_once and self._running[tenant] < most

    def _begin(self) -> None:
        while ready := [tenant for tenant in self._queues if self._has_place(tenant)]:
            tenant = min(ready, key=lambda name: self._running[name])
            queue = self._queues.pop(tenant)
            self._running[tenant] += 1
            self._threads.submit(self._run, tenant, queue.popleft())
            if queue:
                self._queues[tenant] = queue  # behind the others

    def _run(self, tenant: str, job: Job[Any]) -> None:
        job.run()
        with self._changed:
            self._done[tenant] += 1
            self._running -= Counter([tenant])
            self._begin()
            self._changed.notify_all()
