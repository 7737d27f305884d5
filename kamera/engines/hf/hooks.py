"""Forward hooks: those that are part of a model's computation, and those that only observe or count it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.modules import module as globally

from kamera.engines.values import Work

_LIBRARIES = ("transformers.utils.output_capturing", "accelerate.")
"""Libraries whose hooks return outputs or move tensors between devices: they change no number."""


_probing: ContextVar[bool] = ContextVar("kamera_probing", default=False)
_open: ContextVar[tuple[tuple[Meter, Work], ...]] = ContextVar("kamera_open_work", default=())


class Observer:
    """A forward hook that only observes: the return value of ``call`` is dropped.

    Any other hook belongs to the model's computation, so that adding one changes the fingerprint of its
    backbone. Register an observer to count or to time without that. A copied or pickled model keeps an
    observer that does nothing in its place.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Observer, (_nothing,)


def is_foreign(hook: Any) -> bool:
    """True if a hook may change the model's computation."""
    return not (isinstance(hook, Observer) or str(getattr(hook, "__module__", "")).startswith(_LIBRARIES))


def hook_tables(modules: list[nn.Module]) -> list[dict[int, Any]]:
    """The tables of forward hooks of ``modules``, and those of hooks on every module."""
    own = [table for m in modules for table in (m._forward_pre_hooks, m._forward_hooks)]
    return [globally._global_forward_pre_hooks, globally._global_forward_hooks, *own]


def _nothing(*_: Any) -> None:
    pass


class Meter:
    """Counts decoder forwards (and the tokens in them) and vision tower runs of one model, as they begin.

    One that is broken off, by an error or because nobody wants it any more, has run in part and counts.

    A count belongs to the operation that opened it: it covers the work of its own context, that is of its
    thread, and of threads that were started in a copy of the context (`contextvars.copy_context`).
    """

    def __init__(self, decoder: nn.Module, towers: list[nn.Module]) -> None:
        decoder.register_forward_pre_hook(Observer(self._count_decoder), with_kwargs=True)
        for tower in towers:
            tower.register_forward_pre_hook(Observer(self._count_encode))

    @contextmanager
    def measure(self, probes: bool = False) -> Iterator[Work]:
        """Collect the work done inside the block; blocks nest, and the outer one counts all.

        Probes of the model are no work of an operation: they count if asked for.
        """
        work = Work(probes=probes)
        token = _open.set((*_open.get(), (self, work)))
        try:
            yield work
        finally:
            _open.reset(token)

    def add(self, **counts: int) -> None:
        """Count work for the operations that this context is in, as `Work.add`: their share of another's."""
        for meter, work in _open.get():
            if meter is self and (work.probes or not is_probe()):
                work.add(**counts)

    def _count_decoder(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("inputs_embeds")
        if inputs is None:
            inputs = kwargs.get("input_ids", args[0] if args else None)
        self.add(forwards=1, tokens=0 if inputs is None else int(inputs.shape[0] * inputs.shape[1]))

    def _count_encode(self, module: nn.Module, args: Any) -> None:
        self.add(vision_encodes=1)


@contextmanager
def probing() -> Iterator[None]:
    """Context of a probe of the model: `is_probe` tells so inside."""
    token = _probing.set(True)
    try:
        yield
    finally:
        _probing.reset(token)


def is_probe() -> bool:
    """True inside of `probing`: a hook may leave its work out."""
    return _probing.get()
