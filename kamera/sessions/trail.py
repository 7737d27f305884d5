"""What prompts may begin with: windows of other turns and conversations, as a prefix cache knows them.

A prompt takes of such a window what it begins with, in KV that is conditioned on nothing else. So it makes no
difference whose window it was. Windows of sessions are known as long as these have them; one that a client
edits away, and may bring back, is kept up to a number of bytes.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch

from kamera import forks
from kamera.content import Rendered, common_prefix
from kamera.sessions.layout import Layout, anchor_ids, end_of, prefix_tokens, question_start
from kamera.sessions.modes import first_that_knows_more
from kamera.window import EngineWindow, KameraWindow

SessionWindow = KameraWindow | EngineWindow
"""A session's window: of its own, or over an engine."""

KEPT = 256 << 20
"""Bytes of windows that were edited away, of one tenant."""


@dataclass(frozen=True, eq=False)
class Stretch:
    """A ``window``, and the ``layout`` of its prompt; None without one.

    Behind the window's chunks its live KV has ``spoken``: the prompt's last tokens and an answer's,
    int64 ``[tokens]``; None if it does not.
    """

    layout: Layout | None = None
    window: SessionWindow | None = None
    spoken: torch.Tensor | None = None

    def shares(self, prompt: Rendered) -> int:
        """Tokens that ``prompt`` begins with, in KV that knows nothing else; 0 of another system prompt."""
        layout, window = self.layout, self.window
        if layout is None or window is None or anchor_ids(layout.prompt) != anchor_ids(prompt):
            return 0
        clean = first_that_knows_more(window.slots)
        is_clean = clean == len(layout.runs)
        end = end_of(layout if is_clean else Layout(layout.prompt, layout.runs[:clean]))
        tokens = min(prefix_tokens(layout, prompt), end)
        if tokens == end and is_clean and self.spoken is not None:
            starts = (s.start for s in prompt.segments if s.media is not None and s.start >= end)
            coming = prompt.ids[end : next(starts, prompt.num_tokens)]
            tokens += common_prefix(self.spoken.tolist(), coming.tolist())
        return tokens

    def prefix_misses(self, prompt: Rendered) -> int:
        """Tokens of ``prompt`` that a prefix cache would run which has this prompt and its answer."""
        if self.layout is None:
            return prompt.num_tokens
        old = self.layout.prompt
        held = old.ids if self.spoken is None else torch.cat([old.ids[: question_start(old)], self.spoken])
        same = min(len(held), prompt.num_tokens - 1)  # the last one is run for its logits
        same = int((held[:same] == prompt.ids[:same]).long().cumprod(0).sum())
        media = {s.start: s.id for s in old.segments if s.media is not None}
        for segment in prompt.segments:  # pictures have equal tokens
            if segment.media is not None and media.get(segment.start) != segment.id:
                same = min(same, segment.start)
        return prompt.num_tokens - same


class Trail:
    """The stretches of one tenant's sessions, and up to ``limit`` bytes of those edited away. Thread-safe."""

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._lock = forks.Lock()
        self._known: weakref.WeakSet[Stretch] = weakref.WeakSet()
        self._left: OrderedDict[Stretch, int] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of those that were edited away."""
        with self._lock:
            return sum(self._left.values())

    def add(self, stretch: Stretch) -> None:
        """Know a stretch as long as somebody has it."""
        if stretch.window is not None:
            with self._lock:
                self._known.add(stretch)

    def keep(self, stretch: Stretch, nbytes: int) -> None:
        """Keep a stretch of ``nbytes`` that nobody has any more; the oldest make room for it."""
        with self._lock:
            self._left[stretch] = nbytes
            while sum(self._left.values()) > self._limit:
                self._left.popitem(last=False)

    def best(self, prompt: Rendered, but: Stretch) -> tuple[Stretch | None, int]:
        """The stretch that has the most of a prompt's beginning, ``but`` that one, and how many tokens."""
        with self._lock:
            stretches = [s for s in (*self._known, *self._left) if s.window is not but.window]
        best, most = None, 0
        for stretch in stretches:
            if (tokens := stretch.shares(prompt)) > most:
                best, most = stretch, tokens
        with self._lock:
            if best is not None and best in self._left:
                self._left.move_to_end(best)
        return best, most
