"""The operations of a window, each from the same kind of window, over and over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kamera import Chunk, KameraWindow
from kamera.window.report import Report
from lab.speed.content import words
from lab.speed.stock import Stock
from lab.speed.timing import Arm

REORDERED = 4
"""Chunks at the tail that a reorder turns round."""
QUESTION = 16
"""Tokens of a question."""


@dataclass(frozen=True)
class Move:
    """An operation on a window of ``chunks`` chunks; ``prepare``, off the clock, says what to time.

    ``start`` is how many more chunks than that there must be before it. ``moved`` are the bytes it has to
    read and write at the least, where nothing needs to be moved (``idle``) those it is held against.
    ``changed`` are the places, among ``chunks``, a re-prefill would have to run for it.
    """

    name: str
    prepare: Callable[[Deck], Callable[[], object]]
    start: int
    moved: int
    changed: range
    idle: bool = False


class Deck:
    """One window of ``chunks`` chunks out of a stock, brought back to that before every move."""

    def __init__(self, stock: Stock, chunks: int) -> None:
        self.stock = stock
        self.chunks = chunks
        self._spared = ""
        self.window: KameraWindow = stock.window()
        self.forwards = 0
        """Forwards that moves have run since it was made; promised are none."""
        self.question = words(stock.backbone, QUESTION)
        self.ready(chunks)

    # -- before a move -------------------------------------------------------------------------

    def ready(self, count: int) -> None:
        """Exactly ``count`` chunks, all of them conditioned."""
        for slot in self.window.slots:
            if not slot.conditioned:
                self._did(self.window.condition(slot, True))
        while len(self.window) < count:
            self._did(self.window.recall(self.spare().id))
        if len(self.window) > count:
            self._did(self.window.slide(len(self.window) - count))

    def spare(self) -> Chunk:
        """A stored chunk that is not in the window and has a patch for its tail."""
        here = [slot.chunk_id for slot in self.window.slots]
        held = {*here, self._spared}  # the last one may stand behind the window yet, and be written no more
        stored = (self.stock.chunk(i) for i in range(len(here) + 2))
        chunk = next(c for c in stored if c.id not in held)
        self._spared = chunk.id
        self.stock.patch(chunk.id, here)
        return chunk

    def order(self) -> list[int]:
        """The last chunks turned round, with the patches that takes."""
        count = len(self.window)
        first = count - min(REORDERED, count)
        order = [*range(first), *reversed(range(first, count))]
        ids = [slot.chunk_id for slot in self.window.slots]
        new = [ids[i] for i in order]
        for place in range(first, count):
            self.stock.patch(new[place], new[:place])
        return order

    # -- moves ---------------------------------------------------------------------------------

    def moves(self) -> tuple[Move, ...]:
        """All of them."""
        n, kv, keys = self.chunks, self.stock.kv_bytes, self.stock.key_bytes
        middle, turned = (n + 1) // 2, min(REORDERED, n)
        here = range(n // 2, n // 2 + 1)
        return (
            Move("append, stored", Deck._append, 0, 2 * kv, range(n, n + 1)),
            Move("recall", Deck._recall, 0, 2 * kv, range(n, n + 1)),
            Move("slide", Deck._slide, 1, 2 * n * keys, range(n)),
            Move("evict in the middle", Deck._evict, 1, 2 * min(middle, n - middle) * kv, range(middle, n)),
            Move("reorder the tail", Deck._reorder, 0, 2 * turned * kv, range(n - turned, n)),
            Move("condition off", Deck._off, 0, 2 * kv, here),
            Move("condition on", Deck._on, 0, 2 * kv, here),
            Move("fork", Deck._fork, 0, 2 * n * kv, range(n), idle=True),
            Move("fork, then recall", Deck._diverge, 0, 2 * kv, range(n, n + 1)),
        )

    def arm(self, move: Move, *, question: bool = False) -> Arm:
        """The move as an arm; with ``question`` the next question is part of it.

        Patches it needs are stored off the clock. What the moves before it put off, it pays for.
        """

        def before() -> Callable[[], object]:
            self.ready(self.chunks + move.start)
            return move.prepare(self)

        def run(act: Callable[[], object]) -> object:
            done = act()
            if not question:
                return done
            return done, self.ask(done if isinstance(done, KameraWindow) else None)

        return Arm(_asked(move.name) if question else move.name, run, before)

    def question_arm(self) -> Arm:
        """The question alone, to a window that was asked before."""

        def before() -> None:
            self.ready(self.chunks)
            self.ask()

        return Arm("question", lambda _: self.ask(), before)

    def ask(self, window: KameraWindow | None = None) -> torch.Tensor:
        """Logits of a question behind the window (or another)."""
        return (self.window if window is None else window).next_token_logits(self.question)

    def _did(self, report: Report) -> Report:
        self.forwards += report.forwards
        return report

    def _append(self) -> Callable[[], object]:
        spare = self.spare()
        return lambda: self._did(self.window.append(spare))

    def _recall(self) -> Callable[[], object]:
        spare = self.spare().id
        return lambda: self._did(self.window.recall(spare))

    def _slide(self) -> Callable[[], object]:
        return lambda: self._did(self.window.slide())

    def _evict(self) -> Callable[[], object]:
        return lambda: self._did(self.window.evict((self.chunks + 1) // 2))

    def _reorder(self) -> Callable[[], object]:
        order = self.order()
        return lambda: self._did(self.window.reorder(order))

    def _off(self) -> Callable[[], object]:
        return lambda: self._did(self.window.condition(self.chunks // 2, False))

    def _on(self) -> Callable[[], object]:
        self._did(self.window.condition(self.chunks // 2, False))
        return lambda: self._did(self.window.condition(self.chunks // 2, True))

    def _fork(self) -> Callable[[], object]:
        return self.window.fork

    def _diverge(self) -> Callable[[], object]:
        spare = self.spare().id

        def run() -> KameraWindow:
            branch = self.window.fork()
            self._did(branch.recall(spare))
            return branch

        return run


def _asked(name: str) -> str:
    return f"{name}, then a question"
