"""Turns by id: each can be gone on from, whatever came after it, and any can leave from the middle."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from kamera.content import Message
from kamera.errors import UnknownSession, quote


@dataclass(frozen=True)
class Kept:
    """A turn: what was asked behind the turn ``before``, and the answer, its last message.

    ``note`` is what its owner wants to know of it. A turn that left keeps its place, without either.
    """

    before: str | None
    session: str | None
    messages: tuple[Message, ...]
    note: Any = None
    left: bool = False


class History(NamedTuple):
    """The messages up to a turn, and the id of the session that ends with it; None if that went on."""

    messages: list[Message]
    session: str | None


class Branches:
    """The last used ``most`` turns of all tenants."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._last: dict[tuple[str, str | None], str] = {}

    def keep(self, tenant: str, name: str, turn: Kept) -> None:
        """Keep a turn under an id."""
        self._turns[tenant, name] = turn
        self._last[tenant, turn.session] = name
        while len(self._turns) > self._most:
            (whose, old), gone = self._turns.popitem(last=False)
            if self._last.get((whose, gone.session)) == old:
                del self._last[whose, gone.session]

    def turn(self, tenant: str, name: str) -> Kept:
        """A turn. Raises UnknownSession for one that left or was never kept."""
        turn = self._turns.get((tenant, name))
        if turn is None or turn.left:
            raise UnknownSession(
                f"{quote(name)} is not here: it was deleted, or not kept; send the whole history"
            )
        return turn

    def history(self, tenant: str, name: str) -> History:
        """The messages up to a turn, without turns that left. Raises UnknownSession."""
        last = self.turn(tenant, name)
        messages, at = list[Message](), last
        self._turns.move_to_end((tenant, name))
        while at.before is not None:
            messages = [*at.messages, *messages]
            if (tenant, at.before) not in self._turns:
                raise UnknownSession(
                    f"the turns before {quote(name)} are not kept any more: send the whole history"
                )
            self._turns.move_to_end((tenant, at.before))
            at = self._turns[tenant, at.before]
        goes_on = self._last.get((tenant, last.session)) == name
        return History([*at.messages, *messages], last.session if goes_on else None)

    def leave(self, tenant: str, name: str) -> None:
        """Take a turn out of its conversation; those after it stay. Raises UnknownSession."""
        turn = self.turn(tenant, name)
        self._turns[tenant, name] = Kept(turn.before, turn.session, (), left=True)
