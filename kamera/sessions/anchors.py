"""What sessions share: windows with only a system prompt, prefilled once, pictures, and turns by id."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any, TypeVar

import torch

from kamera import forks
from kamera.content import Conversations
from kamera.engines import Engine, Spent
from kamera.errors import ProcessorRequired, quote
from kamera.ops import tensor_digest
from kamera.sessions.branches import Branches
from kamera.sessions.tool_calls import call_form
from kamera.sessions.trail import KEPT, SessionWindow, Stretch, Trail
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy, check_policy
from kamera.window import EngineWindow, KameraWindow, Listener, WindowMemory

OneWindow = TypeVar("OneWindow", KameraWindow, EngineWindow, SessionWindow)

SYSTEM_PROMPTS = 16
"""Number of system prompts per tenant that are kept prefilled for new sessions."""


def conversations_of(backbone: Engine) -> Conversations:
    """The renderer of a backbone. Raises ProcessorRequired if it has no chat template."""
    if backbone.processor is None:
        raise ProcessorRequired(
            "a conversation needs the model's chat template: give the backbone its processor "
            "(Backbone(model, processor))"
        )
    limits = backbone.builder.limits
    return Conversations(backbone.processor, most=backbone.limits.trained, limits=limits)


def check_count(name: str, value: Any, least: int) -> None:
    """Raise ValueError for a value that is no whole number from ``least`` on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={quote(value)}: give a whole number from {least} on")


class Anchors:
    """Opens and forks the windows of sessions that share a backbone, a store and a policy.

    The last ``prompt_limit`` system prompts are kept. ``conversations`` render them, and ``branches`` are the
    turns that they may go on from; by default those of these sessions alone. ``trail`` has what their prompts
    may begin with, ``trail_bytes`` of it edited away. Threads may share one.
    ``listener`` hears all windows. Raises ProcessorRequired for a backbone without a chat template.
    """

    def __init__(
        self,
        backbone: Engine,
        store: ChunkStore,
        *,
        max_tokens: int | None = None,
        policy: ReusePolicy | None = None,
        conversations: Conversations | None = None,
        branches: Branches | None = None,
        prompt_limit: int = 1,
        listener: Listener | None = None,
        trail_bytes: int = KEPT,
    ) -> None:
        check_policy(policy)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens, 1)
        self.backbone = backbone
        self.store = store
        self.conversations = conversations or conversations_of(backbone)
        self.branches = branches or Branches()
        self.trail = Trail(trail_bytes)
        self.calls = call_form(backbone)
        self.prefill_count = 0
        self.max_tokens = max_tokens
        self.policy = policy
        self._prompt_limit = prompt_limit
        self._listener = listener
        self._lock = forks.Lock()
        self._windows: OrderedDict[str, KameraWindow] = OrderedDict()
        self._prefilling: dict[str, forks.Lock] = {}

    def open(self, ids: torch.Tensor) -> tuple[SessionWindow, Spent]:
        """A window without chunks whose anchor is ``ids`` ``[tokens]``, and the work of prefilling them.

        That is none if they were at hand.
        """
        name, opening = tensor_digest(ids), Spent()
        with self._lock:
            prefilling = self._prefilling.setdefault(name, forks.Lock())
        with prefilling:  # who waits wants the same system prompt
            window = self._windows.get(name)
            if window is None:
                start_time = time.perf_counter()
                with self.backbone.measure() as work:  # none where the store has the prompt
                    window = KameraWindow(
                        self.backbone, self.store, ids, max_tokens=self.max_tokens, policy=self.policy
                    )
                    self.listen_to(window)
                seconds = time.perf_counter() - start_time
                opening = Spent(work.forwards, work.tokens, work.vision_encodes, seconds)
            with self._lock:
                self._prefilling.pop(name, None)
                self.prefill_count += opening.forwards
                self._windows[name] = window
                self._windows.move_to_end(name)
                while len(self._windows) > self._prompt_limit:
                    self._windows.popitem(last=False)
                return window.fork(), opening

    def listen_to(self, window: KameraWindow) -> None:
        """Listen to a window, and to its forks."""
        if self._listener is not None:
            window.on_event(self._listener)

    # a window's forks share state, so only one thread at a time may create or measure them

    def fork(self, window: OneWindow, *, apart: bool = False) -> OneWindow:
        """A fork of a window; ``apart`` as in `KameraWindow.fork`."""
        with self._lock:
            return window.fork(apart=apart)

    def leave(self, stretch: Stretch) -> None:
        """Keep a stretch that its session has left, for a client that takes its edit back."""
        if isinstance(stretch.window, KameraWindow):
            window = self.fork(stretch.window, apart=True)
            self.trail.keep(replace(stretch, window=window), self.memory(window).own)

    def memory(self, window: SessionWindow | None) -> WindowMemory:
        """The bytes of a window; none without one, or of one over an engine, which has the KV."""
        with self._lock:
            return window.memory() if isinstance(window, KameraWindow) else WindowMemory(0, 0, 0, 0)
