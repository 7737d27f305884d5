"""The price of a plan, counted while it is made."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kamera.patches import in_groups
from kamera.window.requests import Newcomer
from kamera.window.seats import Seat
from kamera.window.steps import Cost


@dataclass
class Price:
    """Forwards, and tokens in them: of the operation, and of what it leaves for later work."""

    forwards: int = 0
    tokens: int = 0
    owed: list[Seat] = field(default_factory=list)

    def ran(self, chunk: Newcomer | Seat, head: int = 0, joined: bool = False) -> None:
        """Count a forward of a chunk behind its first ``head`` tokens, unless it is ``joined`` to another."""
        self.forwards += chunk.length > head and not joined
        self.tokens += chunk.length - head

    def sampled(self, tokens: int, joined: bool) -> None:
        """Count a forward of some ``tokens`` of a chunk, unless it is ``joined`` to another."""
        self.forwards += not joined
        self.tokens += tokens

    def owes(self, seat: Seat) -> None:
        """Count a canonical that is prefilled as later work."""
        self.owed.append(seat)

    def now(self, encodes: int, turned: int, patched: int) -> Cost:
        """The operation's cost, with its vision encodes and the bytes it turns and patches."""
        return Cost(self.forwards, self.tokens, encodes, turned, patched)

    def later(self, form: Callable[[str], Hashable | None]) -> Cost:
        """The cost of what is left: chunks of one ``form`` share a forward."""
        seats = {seat.chunk_id: seat for seat in self.owed}
        by_id, length = lambda seat: form(seat.chunk_id), lambda seat: seat.length
        groups = in_groups(seats.values(), by_id, length) if len(seats) > 1 else [*seats]
        return Cost(len(groups), sum(map(length, seats.values())))
