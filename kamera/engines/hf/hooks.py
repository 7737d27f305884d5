"""Forward hooks: Kamera's own, which count work or stop a forward, and foreign ones, which may change it.

Also the turns of forwards on one model (`Pauses`), which background work gives up between layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as globally

from kamera import forks
from kamera.content import exclusive_of
from kamera.engines.base import Work
from kamera.engines.work import Calls, check_cancelled, is_later

_LIBRARIES = ("transformers.", "accelerate.")
"""Libraries whose hooks return outputs or move tensors between devices: they change no number."""

Hook = tuple[dict[int, Any], int, Any]
"""The table that a hook stands in, its key there, and the hook."""

_uncounted: ContextVar[bool] = ContextVar("kamera_uncounted", default=False)
_open: ContextVar[tuple[tuple[Meter, Work], ...]] = ContextVar("kamera_open_work", default=())


class OwnHook:
    """A hook of Kamera's own. A copied or pickled model has one that does nothing in its place."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The tables of forward hooks of ``modules``, and of hooks on every module."""
    own = [table for m in modules for table in (m._forward_pre_hooks, m._forward_hooks)]
    return [globally._global_forward_pre_hooks, globally._global_forward_hooks, *own]


def foreign_hooks(tables: Iterable[dict[int, Any]]) -> list[Hook]:
    """The hooks that are neither Kamera's nor a library's."""
    return [
        (table, key, hook)
        for table in filter(None, tables)
        for key, hook in list(table.items())
        if not isinstance(hook, OwnHook) and not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES)
    ]


class _Mute:
    """Stands in for a foreign hook while a thread is `unobserved`; ``users`` is how many are."""

    def __init__(self, hook: Any) -> None:
        self.hook, self.users = hook, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return None if _uncounted.get() else self.hook(*arguments, **options)


_muting = forks.Lock()


@contextmanager
def unobserved(hooks: Iterable[Hook]) -> Iterator[None]:
    """Context of trials of a model: no work of an operation, and ``hooks`` do nothing in this thread.

    Forwards of other threads run the hooks.
    """
    with _muting:
        places = [(table, key) for table, key, _ in hooks if key in table]
        for table, key in places:
            hook = table[key]
            table[key] = hook if isinstance(hook, _Mute) else _Mute(hook)
            table[key].users += 1
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)
        with _muting:
            for table, key in places:
                mute = table.get(key)  # its owner may have removed it
                if isinstance(mute, _Mute):
                    mute.users -= 1
                    if not mute.users:
                        table[key] = mute.hook


class Meter:
    """Counts decoder forwards (and the tokens in them) and vision tower runs of one model, as they begin.

    One that is broken off, by an error or because nobody wants it any more, has run in part and counts.

    A count belongs to the operation that opened it: it covers the work of its own context, that is of its
    thread, and of threads that were started in a copy of the context (`contextvars.copy_context`).
    """

    def __init__(self, decoder: nn.Module, towers: list[nn.Module]) -> None:
        decoder.register_forward_pre_hook(OwnHook(self._count_decoder), with_kwargs=True)
        for tower in towers:
            tower.register_forward_pre_hook(OwnHook(self._count_encode))

    @contextmanager
    def measure(self) -> Iterator[Work]:
        """Collect the work done inside the block; blocks nest, and the outer one counts all."""
        work = Work()
        token = _open.set((*_open.get(), (self, work)))
        try:
            yield work
        finally:
            _open.reset(token)

    def add(self, **counts: int) -> None:
        """Count work for the operations that this context is in, as `Work.add`: their share of another's."""
        if not _uncounted.get():
            for meter, work in _open.get():
                if meter is self:
                    work.add(**counts)

    def _count_decoder(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("inputs_embeds")
        if inputs is None:
            inputs = kwargs.get("input_ids", args[0] if args else None)
        self.add(forwards=1, tokens=0 if inputs is None else int(inputs.shape[0] * inputs.shape[1]))

    def _count_encode(self, module: nn.Module, args: Any) -> None:
        self.add(vision_encodes=1)


class Pauses(OwnHook):
    """Turns of forwards on one model: each alone or beside others, and background work behind ``calls``.

    It is a hook in front of the layers of its ``decoder``, which stops the forwards that pause. There, and in
    front of the layers of ``towers``, a call ends that was cancelled (`cancel_when`).
    """

    def __init__(self, calls: Calls, model: nn.Module, decoder: Any, towers: Sequence[nn.Module]) -> None:
        super().__init__(self._pause_between_layers)
        self._calls = calls
        self._exclusive = exclusive_of(model)
        self._thread = threading.local()
        for layer in decoder.layers:
            layer.register_forward_pre_hook(self)
        parts = [part for tower in towers for part in tower.modules()]
        for layer in [layer for part in parts if isinstance(part, nn.ModuleList) for layer in part]:
            layer.register_forward_pre_hook(OwnHook(lambda *_: check_cancelled()))

    def __call__(self, *_: Any) -> None:
        check_cancelled()
        if getattr(self._thread, "pauses", False):
            self._call()

    def alone(self) -> AbstractContextManager[None]:
        """Wait until no other thread runs a forward of the model, and keep them waiting for the block.

        Code that runs the model other than by the methods of `HfEngine` must hold it. Re-entrant.
        """
        return self._exclusive

    @property
    def holds_model(self) -> bool:
        """True if this thread holds the model."""
        return self._exclusive.is_mine

    @contextmanager
    def forward_turn(self, *, alone: bool, pauses: bool) -> Iterator[None]:
        """Context of one forward, which is ``alone`` on the model. Raises WorkCancelled.

        Background work gives way before it and, if it ``pauses``, between its layers; not while this thread
        holds the model for more than the forward.
        """
        if self._exclusive.is_mine:
            yield
            return
        self._calls.give_way()
        check_cancelled()
        with self._exclusive if alone else nullcontext():
            self._thread.pauses = pauses and is_later()
            try:
                yield
            finally:
                self._thread.pauses = False

    def _pause_between_layers(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # so that no more than one layer waits there
        if not self._calls.must_give_way:
            return
        with self._exclusive.released() if self._exclusive.is_mine else nullcontext():
            self._calls.give_way()
