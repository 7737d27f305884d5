"""The price of a plan, counted while it is made."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.window.requests import Newcomer
from kamera.window.seats import Seat
from kamera.window.steps import Cost


@dataclass
class Price:
    """Forwards, and tokens in them: of the operation, and of what it leaves for later work."""

    forwards: int = 0
    tokens: int = 0
    later_forwards: int = 0
    later_tokens: int = 0

    def ran(self, chunk: Newcomer | Seat, head: int = 0, joined: bool = False) -> None:
        """Count a forward of a chunk behind its first ``head`` tokens, unless it is ``joined`` to another."""
        self.forwards += chunk.length > head and not joined
        self.tokens += chunk.length - head

    def owes(self, seat: Seat) -> None:
        """Count a canonical that is prefilled as later work."""
        self.later_forwards += 1
        self.later_tokens += seat.length

    def now(self, encodes: int, turned: int, patched: int) -> Cost:
        """The operation's cost, with its vision encodes and the bytes it turns and patches."""
        return Cost(self.forwards, self.tokens, encodes, turned, patched)

    @property
    def later(self) -> Cost:
        """The cost of what is left."""
        return Cost(self.later_forwards, self.later_tokens)
