"""Forming off the critical path: patches are factored and stored while the window goes on."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch

from kamera import forks
from kamera.errors import quote
from kamera.ops import Deltas, kv_tensors
from kamera.patches.later import Later, Told, Worth
from kamera.patches.owed import Owed, pay

FormingRule = Literal["now", "background"]
"""Time at which a patch is factored and stored: within the operation that ran its forward, or after it."""

logger = logging.getLogger(__name__)


class Forming:
    """Forms patches at once, within the operation that ran their forwards; later work waits for `flush`.

    The accounts of the call that leaves it bear it, if a backbone's ``queue`` is given.
    """

    def __init__(self, queue: Later | None = None) -> None:
        self._later: Callable[[], None] | None = None
        self._borne = _as_it_is if queue is None else queue.borne

    def submit(
        self,
        chunk_id: str,
        deltas: Deltas,
        form: Callable[[], Owed],
        holds: Iterable[torch.Tensor] = (),
        dropped: Told = logger.warning,
    ) -> None:
        """Store what ``form`` makes, which factors ``deltas``: the patch.

        Nothing else may write to ``deltas`` any more. ``holds`` are the other tensors that it needs;
        ``dropped`` is told why, if the patch is not formed for want of room.
        """
        pay([form()])

    def later(self, work: Callable[[], None]) -> bool:
        """Have ``work`` done that no operation waits for; False if there is other such work already."""
        if self._later is not None:
            return False
        self._later = self._borne(work)
        return True

    def settle(self, chunk_id: str) -> None:
        """Wait for the patches of a chunk that are in progress."""

    def flush(self) -> None:
        """Wait for all patches in progress, and do later work; raises the error that kept one from being
        stored."""
        work, self._later = self._later, None
        if work is not None:
            work()

    def close(self) -> None:
        """`flush`, without later work; patches that come later are formed at once."""
        self._later = None


class BackgroundForming(Forming):
    """Forms patches one after another, as later work in ``queue``. Safe to use from several threads.

    On CUDA the work runs on its own stream. A look-up of a chunk's patch waits (`settle`) until those in
    progress for it are stored, which go first then, so the KV served never depends on the thread's speed. A
    failure is logged when it happens and raised by the next `flush`; until then the patch is a miss, as is
    one that the queue drops.
    """

    def __init__(self, queue: Later) -> None:
        super().__init__()
        self._queue = queue
        self._begin()
        forks.bind(self, BackgroundForming._begin)

    def _begin(self) -> None:
        """Start with no patch in progress: after a process fork, the parent stores those it was forming."""
        self._changed = threading.Condition()
        self._pending: Counter[str] = Counter()  # chunk ids
        self._busy = False
        self._errors: list[BaseException] = []
        self._closed = False

    def submit(
        self,
        chunk_id: str,
        deltas: Deltas,
        form: Callable[[], Owed],
        holds: Iterable[torch.Tensor] = (),
        dropped: Told = logger.warning,
    ) -> None:
        """As `Forming.submit`, in the background; within later work, at once. Never waits."""
        with self._changed:
            at_once = self._closed or self._queue.mine
            self._pending.update(() if at_once else (chunk_id,))
        if at_once:
            pay([form()])
            return
        work = partial(self._run, chunk_id, _streamed(deltas, form))
        held = (*holds, *kv_tensors(deltas))
        told = partial(self._dropped, chunk_id, dropped)
        self._queue.add(work, Worth.PATCH, held, told, chunk_id, reads=())

    def later(self, work: Callable[[], None]) -> bool:
        """As `Forming.later`, behind the patches in progress."""
        with self._changed:
            if self._busy or self._closed:
                return False
            self._busy = True
        self._queue.add(partial(self._run_later, work), Worth.AUDIT, dropped=self._later_dropped)
        return True

    def settle(self, chunk_id: str) -> None:
        """As `Forming.settle`: they go first. Within later work nothing is waited for."""
        if self._queue.mine or not self._pending[chunk_id]:
            return
        self._queue.hasten(chunk_id)
        with self._queue.awaited(), self._changed:
            self._changed.wait_for(lambda: not self._pending[chunk_id])

    def flush(self) -> None:
        """As `Forming.flush`: raises the first error since the last call, once."""
        with self._queue.awaited(), self._changed:
            self._changed.wait_for(lambda: not self._pending.total() and not self._busy)
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """As `Forming.close`."""
        with self._changed:
            self._closed = True
        self.flush()

    def _run(self, chunk_id: str, form: Callable[[], Owed]) -> list[Owed]:
        try:
            owed = form()
        except BaseException as error:  # no error may be lost with the thread
            self._unstored(chunk_id, error)
            self._done(chunk_id)
            return []

        def told(error: Exception | None) -> None:
            try:
                owed.told(error)
            except Exception as raised:
                self._unstored(chunk_id, raised)

        return [replace(owed, told=told).then(partial(self._done, chunk_id))]

    def _unstored(self, chunk_id: str, error: BaseException) -> None:
        self._failed(f"a patch of chunk {chunk_id[:12]} was not stored", error)

    def _dropped(self, chunk_id: str, told: Told, why: str) -> None:
        self._done(chunk_id)
        told(why)

    def _done(self, chunk_id: str) -> None:
        with self._changed:
            self._pending -= Counter((chunk_id,))  # drops the entry at zero
            self._changed.notify_all()

    def _run_later(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed("later work was not done", error)
        finally:
            self._no_later()

    def _later_dropped(self, why: str) -> None:
        logger.warning("later work was not done: %s", why)
        self._no_later()

    def _no_later(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _failed(self, what: str, error: BaseException) -> None:
        logger.error("%s: %s", what, error)
        with self._changed:
            self._errors.append(error)


def forming_of(rule: FormingRule | None, queue: Later, proving: bool = False) -> Forming:
    """The `Forming` of a rule; of none, in the background if patches have to prove themselves, else now.

    ``queue`` takes the background's work, and knows which accounts bear what waits for a flush.

    Raises ValueError for an unknown rule.
    """
    rule = rule or ("background" if proving else "now")
    if rule not in get_args(FormingRule):
        raise ValueError(f"forming {quote(rule)} is none of {', '.join(get_args(FormingRule))}")
    return Forming(queue) if rule == "now" else BackgroundForming(queue)


def _as_it_is(work: Callable[[], None]) -> Callable[[], None]:
    return work


def _streamed(deltas: Deltas, form: Callable[[], Owed]) -> Callable[[], Owed]:
    """``form`` on its own CUDA stream, after the work that computes ``deltas``; without CUDA itself."""
    given = list(kv_tensors(deltas))
    if not given or given[0].device.type != "cuda":
        return form
    device = given[0].device
    caller = torch.cuda.current_stream(device)
    ready = caller.record_event()

    def on_stream() -> Owed:
        own = torch.cuda.Stream(device)  # from a pool of streams
        own.wait_event(ready)
        with torch.cuda.stream(own):
            owed = form()
        # memory of one stream that the other uses must not be reused before both are done with it
        for tensor in given:
            tensor.record_stream(own)
        for record in owed.records:
            for tensor in record.tensors().values():
                if tensor.is_cuda:
                    tensor.record_stream(caller)
        own.synchronize()
        return owed

    return on_stream
