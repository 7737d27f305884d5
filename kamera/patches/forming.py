"""Forming off the critical path: patches are factored and stored while the window goes on."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import torch

from kamera.ops import Deltas, Patch
from kamera.store import forks

FormingRule = Literal["now", "background"]
"""When a patch is factored and stored: within the operation that ran its forward, or behind it."""

LIMIT = 4
"""Patches under way at most; each holds its deficits, twice the chunk's KV bytes at half precision."""

logger = logging.getLogger(__name__)


class Forming:
    """Forms patches at once, within the operation that ran their forwards."""

    def submit(self, chunk_id: str, deltas: Deltas, form: Callable[[], Patch]) -> None:
        """Have ``form`` factor ``deltas`` and store the patch it returns.

        ``deltas`` must be nobody else's: nothing may write to them any more.
        """
        form()

    def settle(self, chunk_id: str) -> None:
        """Wait for the patches of a chunk that are under way."""

    def flush(self) -> None:
        """Wait for all patches under way; raises what kept one of them from being stored."""

    def close(self) -> None:
        """`flush`; patches that come later are formed at once."""


class BackgroundForming(Forming):
    """Patches under way, formed one after another by one thread. Safe to use from several threads.

    On CUDA the work runs on a stream of its own. Whoever looks for a patch of a chunk waits (`settle`)
    until those under way for it are stored, so what is served never depends on the thread's pace. A
    failure is logged when it happens and raised by the next `flush`; until then the patch is a miss.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise ValueError(f"limit {limit} must be at least 1")
        self._limit = limit
        self._begin()
        forks.bind(self, BackgroundForming._begin)

    def _begin(self) -> None:
        """Nothing under way: what a parent forms when it forks is the parent's to store."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kamera-forming")
        self._changed = threading.Condition()
        self._pending: Counter[str] = Counter()  # chunk ids
        self._errors: list[BaseException] = []
        self._closed = False

    def submit(self, chunk_id: str, deltas: Deltas, form: Callable[[], Patch]) -> None:
        """As `Forming.submit`, soon; waits while ``limit`` patches are under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.total() < self._limit)
            if not self._closed:
                self._pool.submit(self._run, chunk_id, _streamed(deltas, form))
                self._pending[chunk_id] += 1
                return
        form()

    def settle(self, chunk_id: str) -> None:
        """As `Forming.settle`; not for the forming thread itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending[chunk_id])

    def flush(self) -> None:
        """As `Forming.flush`: the first error since the last time, once."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending.total())
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """As `Forming.close`; the thread ends."""
        with self._changed:
            self._closed = True
        self._pool.shutdown()
        self.flush()

    def _run(self, chunk_id: str, form: Callable[[], Patch]) -> None:
        try:
            form()
        except BaseException as error:  # whatever it is, it must not be lost with the thread
            logger.error("a patch of chunk %s was not stored: %s", chunk_id[:12], error)
            with self._changed:
                self._errors.append(error)
        finally:
            with self._changed:
                self._pending -= Counter((chunk_id,))  # and forget it at zero
                self._changed.notify_all()


def forming_of(rule: FormingRule) -> Forming:
    """What forms patches under a rule. Raises ValueError for a rule there is not."""
    if rule not in get_args(FormingRule):
        raise ValueError(f"forming {rule!r} is none of {', '.join(get_args(FormingRule))}")
    return Forming() if rule == "now" else BackgroundForming()


def _streamed(deltas: Deltas, form: Callable[[], Patch]) -> Callable[[], Patch]:
    """``form`` on a CUDA stream of its own, behind the work that gives ``deltas`` now; itself elsewhere."""
    given = [tensor for layer in deltas for tensor in layer.values()]
    if not given or given[0].device.type != "cuda":
        return form
    device = given[0].device
    caller = torch.cuda.current_stream(device)
    ready = caller.record_event()

    def on_stream() -> Patch:
        own = torch.cuda.Stream(device)  # from a pool of streams
        own.wait_event(ready)
        with torch.cuda.stream(own):
            patch = form()
        # memory of one stream that the other uses must not be given away before both are done with it
        for tensor in given:
            tensor.record_stream(own)
        for layer in patch.layers:
            for low in layer.values():
                for tensor in low.tensors().values():
                    if tensor.is_cuda:
                        tensor.record_stream(caller)
        own.synchronize()
        return patch

    return on_stream
