"""Forwards of later work stop between layers while a call is in progress; what nobody wants ends there.

Between two layers all that a forward has computed is in its own thread: hidden states, masks and rotary
tables are arguments, its KV is in its own cache, counts are its operation's. So another forward of the same
model may run there as it may run beside it: if a forward was seen to leave no state in the model
(`Model.quiet`). Else later work gives way between its forwards alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from kamera.content import exclusive_of
from kamera.engines.hf.hooks import OwnHook
from kamera.engines.precedence import Calls, check_cancelled, is_later


class Pauses(OwnHook):
    """Turns of forwards on one model: each alone or beside others, and later work behind ``calls``.

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

        Code that runs the model other than by the methods of `Model` must hold it. Re-entrant.
        """
        return self._exclusive

    @property
    def holds_model(self) -> bool:
        """True if this thread holds the model."""
        return self._exclusive.is_mine

    @contextmanager
    def forward_turn(self, *, alone: bool, pauses: bool) -> Iterator[None]:
        """Context of one forward, which is ``alone`` on the model. Raises WorkCancelled.

        Later work gives way before it and, if it ``pauses``, between its layers; not while this thread holds
        the model for more than the forward.
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
