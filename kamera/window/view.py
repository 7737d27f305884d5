"""What a window holds, and the manners of a deque: length, indexing, iteration, membership."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import overload

from kamera.content import Chunk
from kamera.engines import Engine
from kamera.patches import Anchor, Guarantee, weakest
from kamera.store import ChunkStore, Context
from kamera.window.bounds import Bounds
from kamera.window.certificate import Certificate
from kamera.window.certified import Terms
from kamera.window.html import slot_table
from kamera.window.memory import Holdings, WindowMemory
from kamera.window.policy import ReusePolicy
from kamera.window.run import Stage
from kamera.window.slots import Slot
from kamera.window.state import WindowState


class View:
    """A window as one looks at it; nothing here changes it.

    It is a sequence of its slots: ``window[0]``, ``window[-1]``, ``window[1:]``, ``for slot in window``,
    ``slot in window``, ``chunk_id in window``; an empty one is false. Its attributes cannot be set.
    """

    _stage: Stage
    _bounds: Bounds
    _state: WindowState
    _terms: Terms
    _lock: threading.RLock
    _family: weakref.WeakSet[View]  # it and its forks
    _shown: tuple[WindowState, tuple[Slot, ...]] | None = None  # the slots of the state last asked for

    @property
    def backbone(self) -> Engine:
        """The model behind it."""
        return self._stage.former.backbone

    @property
    def store(self) -> ChunkStore:
        """Where its chunks are archived."""
        return self._stage.former.store

    @property
    def context(self) -> Context:
        """What its chunks are stored under: backbone, system prompt, tenant, form of the KV."""
        return self._stage.former.context

    @property
    def policy(self) -> ReusePolicy:
        """What it may serve: the policy it was given, or the exact part of it without a certificate."""
        return self._terms.served

    @property
    def certificate(self) -> Certificate | None:
        """The certificate it serves less than exact KV under; None when it needs none or has none."""
        return self._terms.certificate

    @property
    def anchor(self) -> Anchor:
        """The tokens it begins with."""
        return self._stage.former.anchor

    @property
    def max_tokens(self) -> int | None:
        """The bound on anchor and chunks, None for none."""
        return self._bounds.max_tokens

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The chunks in order, with where they stand and what their KV is worth."""
        state = self._state
        if self._shown is None or self._shown[0] is not state:
            self._shown = (state, state.slots(self.anchor.length, self.backbone.bytes_per_token))
        return self._shown[1]

    @property
    def num_tokens(self) -> int:
        """Tokens held, anchor included."""
        return self.anchor.length + sum(r.facts.length for r in self._state.residents)

    @property
    def guarantee(self) -> Guarantee:
        """The weakest guarantee in the window."""
        return weakest(slot.guarantee for slot in self.slots)

    def memory(self) -> WindowMemory:
        """The bytes it holds: live room, copies, encodings, and how much of that its forks hold too."""
        return self._holdings().memory(w._holdings() for w in self._family if w is not self)

    def __len__(self) -> int:
        return len(self._state.residents)

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Slot, ...]: ...
    def __getitem__(self, index: int | slice) -> Slot | tuple[Slot, ...]:
        try:
            return self.slots[index]
        except IndexError:
            raise IndexError(f"slot {index} of a window of {len(self)}") from None

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __contains__(self, what: object) -> bool:
        """Whether a slot is in this window, or a chunk (by its id) in view."""
        if isinstance(what, Slot):
            return any(slot.number == what.number for slot in self.slots)
        chunk_id = what.id if isinstance(what, Chunk) else what
        return any(slot.chunk_id == chunk_id for slot in self.slots)

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"a window's {name!r} cannot be set: make a new KameraWindow with it")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        limit = "" if self.max_tokens is None else f" of {self.max_tokens}"
        return f"KameraWindow({len(self)} chunks, {self.num_tokens}{limit} tokens, {self.guarantee})"

    def _repr_html_(self) -> str:
        """For notebooks; text of chunks is escaped."""
        return slot_table(repr(self), self.slots)

    def _holdings(self) -> Holdings:
        return Holdings.of(self.anchor, self._state, self._stage.live)
