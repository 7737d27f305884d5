"""One thread that runs the model, and the queue before it, in which tenants take turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kamera.serve.refusal import Refusal, refusal_of

Result = TypeVar("Result")

TIMEOUT = 600.0
"""Seconds that a request may take, its wait included."""


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class Job(Generic[Result]):
    """Work for the worker's thread. The loop that makes it hears texts, then one result or a refusal."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[str | Refusal | tuple[Result]] = asyncio.Queue()
        self._cancelled = False
        self._until = time.monotonic() + TIMEOUT

    def work(self) -> Result:
        """What the worker runs."""
        raise NotImplementedError

    def tell(self, text: str) -> None:
        """Tell the loop a piece of the answer. Raises Cancelled, and Refusal if it has taken too long."""
        if self._cancelled:
            raise Cancelled
        if time.monotonic() > self._until:
            raise Refusal(504, f"no answer within {TIMEOUT:.0f} s: ask for fewer tokens, or later")
        if text:
            self._put(text)

    def run(self) -> None:
        """`work`, and tell the loop."""
        try:
            self.tell("")
            self._put((self.work(),))
        except Cancelled:
            pass
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

    async def leave(self, message: object) -> None:
        """As `cancel`, for a connection that ends with a message."""
        self.cancel()

    def _put(self, what: str | Refusal | tuple[Result]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, what)
        except RuntimeError:  # the loop is closed
            self._cancelled = True


class Worker:
    """Runs jobs one after another; of several tenants that wait each gets its turn.

    ``most`` jobs may wait, and half of them of one tenant while others wait, too.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: OrderedDict[str, deque[Job[Any]]] = OrderedDict()
        self._changed = threading.Condition()
        self._closing = False
        self.done = 0
        self._thread = threading.Thread(target=self._run, name="kamera-serve", daemon=True)
        self._thread.start()

    def submit(self, tenant: str, job: Job[Any]) -> None:
        """Let a job run. Raises Refusal if too many wait, or the server is stopping."""
        with self._changed:
            if self._closing:
                raise Refusal(503, "the server is stopping: ask another", wait=10)
            mine, waiting = len(self._queues.get(tenant, ())), self.waiting
            if waiting >= self._most or (mine < waiting and mine >= max(1, self._most // 2)):
                raise Refusal(429, f"{waiting} requests wait: try again later", wait=1 + waiting // 4)
            self._queues.setdefault(tenant, deque()).append(job)
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return sum(map(len, self._queues.values()))

    def close(self) -> None:
        """Run what waits, then end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            self.done += 1

    def _next(self) -> Job[Any] | None:
        with self._changed:
            while not self._queues:
                if self._closing:
                    return None
                self._changed.wait()
            tenant, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind the others
            return job
