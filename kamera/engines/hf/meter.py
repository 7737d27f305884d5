"""Counts of model work, by hooks on the decoder and the vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from kamera.engines.hf.hooks import Observer
from kamera.engines.values import Work

_probing: ContextVar[bool] = ContextVar("kamera_probing", default=False)
_open: ContextVar[tuple[tuple[Meter, Work], ...]] = ContextVar("kamera_open_work", default=())


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
        given = kwargs.get("inputs_embeds")
        if given is None:
            given = kwargs.get("input_ids", args[0] if args else None)
        self.add(forwards=1, tokens=0 if given is None else int(given.shape[0] * given.shape[1]))

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
