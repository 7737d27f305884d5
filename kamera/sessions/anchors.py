"""Windows with only a system prompt: prefilled once, forked for every session that begins with it."""

from __future__ import annotations

import os
import secrets
import time
from collections import OrderedDict
from typing import NamedTuple

import torch

from kamera import forks
from kamera.engines import Engine, Spent
from kamera.ops import tensor_digest
from kamera.store import ChunkStore
from kamera.window import KameraWindow, ReusePolicy, Trace, WindowMemory, check_policy


class Opened(NamedTuple):
    """A window without chunks, and the work of prefilling its system prompt: none if that was at hand."""

    window: KameraWindow
    spent: Spent


class Anchors:
    """Opens and forks the windows of sessions that share a backbone, a store and a policy.

    The last ``held`` system prompts are kept. Threads may share one. ``trace`` as for `KameraWindow`, with
    one name for all windows.
    """

    def __init__(
        self,
        backbone: Engine,
        store: ChunkStore,
        *,
        max_tokens: int | None = None,
        policy: ReusePolicy | None = None,
        held: int = 1,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        check_policy(policy)
        self.backbone = backbone
        self.store = store
        self.prefilled = 0
        self.max_tokens = max_tokens
        self.policy = policy
        self._held = held
        self._trace = None if trace is None else Trace(trace, session=secrets.token_hex(4))
        self._lock = forks.Lock()
        self._windows: OrderedDict[str, KameraWindow] = OrderedDict()

    def open(self, ids: torch.Tensor) -> Opened:
        """A window without chunks whose anchor is ``ids`` ``[tokens]``."""
        name, spent = tensor_digest(ids), Spent()
        with self._lock:
            if name not in self._windows:
                started = time.perf_counter()
                with self.backbone.measure() as work:  # none where the store has the prompt
                    self._windows[name] = KameraWindow(
                        self.backbone, self.store, ids, max_tokens=self.max_tokens, policy=self.policy
                    )
                    if self._trace is not None:
                        self._windows[name].on_event(self._trace)
                seconds = time.perf_counter() - started
                spent = Spent(work.forwards, work.tokens, work.vision_encodes, seconds)
                self.prefilled += spent.forwards
            self._windows.move_to_end(name)
            while len(self._windows) > self._held:
                self._windows.popitem(last=False)
            return Opened(self._windows[name].fork(), spent)

    # a window's forks share state, so only one thread at a time may create or measure them

    def fork(self, window: KameraWindow, *, apart: bool = False) -> KameraWindow:
        """A fork of a window from `open`; ``apart`` as in `KameraWindow.fork`."""
        with self._lock:
            return window.fork(apart=apart)

    def memory(self, window: KameraWindow) -> WindowMemory:
        """The bytes of a window from `open`."""
        with self._lock:
            return window.memory()
