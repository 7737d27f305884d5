"""Timers of verbs: what becomes of stored objects after some turns or seconds of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kamera.errors import KameraError
from kamera.store import ChunkStore, StoreAdmin

Does = Literal["decay", "unpin"]

Clock = Callable[[], float]
"""Seconds since 1970."""


@dataclass(frozen=True)
class Timer:
    """The stored objects of ``chunks`` decay, or lose their pins, once either limit is reached.

    ``turn``: after that many complete answers of the session. ``time``: seconds of the session's clock.
    """

    does: Does
    chunks: tuple[str, ...]
    turn: int | None
    time: float | None

    def due(self, turn: int, now: float) -> bool:
        """True once the session has given ``turn`` answers, or its clock shows ``now``."""
        late = self.time is not None and now >= self.time
        return late or (self.turn is not None and turn >= self.turn)


def aged(
    timers: Sequence[Timer], turn: int, now: float, store: ChunkStore
) -> tuple[tuple[Timer, ...], tuple[str, ...]]:
    """Run the timers that are due after ``turn`` answers; those that are left, and notes.

    A timer that fails fails no answer: it is noted, and is left for the next.
    """
    admin, left, notes = StoreAdmin(store), [], []
    for timer in timers:
        if not timer.due(turn, now):
            left.append(timer)
            continue
        try:
            keys = keys_of(store, timer.chunks)
            count = admin.objects.demote(keys) if timer.does == "decay" else admin.unpin(keys)
            notes.append(f"{timer.does}: {count} objects")
        except KameraError as error:
            left.append(timer)
            notes.append(f"{timer.does} is tried again: {error}")
    return tuple(left), tuple(notes)


def keys_of(store: ChunkStore, chunks: Sequence[str]) -> list[str]:
    """Names of all stored objects of these chunks."""
    return [info.key for chunk in chunks for info in store.ls(chunk_id=chunk)]
