"""Forward hooks: Kamera's own, which count work or stop a forward, and foreign ones, which may change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.modules import module as globally

from kamera import forks
from kamera.engines.values import Work

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
