"""A request to a pool, and what of it tells its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kamera.content import Message, Rendered
from kamera.errors import KameraError
from kamera.forks import lazy
from kamera.sessions.anchors import Anchors
from kamera.sessions.branches import whole_history
from kamera.sessions.layout import anchor_ids
from kamera.sessions.modes import Manner
from kamera.sessions.owners import tails_of


@dataclass(frozen=True, eq=False)
class Incoming:
    """``messages`` of a tenant, for a session of its own choice, behind a turn, or found by content."""

    anchors: Anchors
    manner: Manner
    messages: str | Message | Sequence[Message]
    session_id: str | None = None
    after: str | None = None
    hint: str = ""

    @property
    def tenant(self) -> str:
        """The tenant whose request it is."""
        return self.anchors.store.tenant

    @lazy
    def whole(self) -> Sequence[Message] | None:
        """The history with the messages; None if only the session has it. Raises UnknownTurn, ValueError."""
        if self.after is not None:
            return whole_history(self.anchors.branches.history(self.after), self.messages, branches=True)
        return None if isinstance(self.messages, str | Mapping) else self.messages

    @lazy
    def prompt(self) -> Rendered | None:
        """The prompt of the history; None if it cannot be cut, an error that its session raises."""
        if self.whole is None:
            return None
        try:
            shaped = self.manner.shaped(self.whole, 0)
            return self.anchors.conversations.render(shaped, tools=self.manner.tools)
        except (KameraError, ValueError):
            return None

    @lazy
    def tails(self) -> frozenset[str]:
        """The tails of the history (`kamera.sessions.owners`)."""
        if self.whole is None or self.prompt is None:
            return frozenset()
        owner = (self.tenant, self.manner.kind, self.hint)
        return tails_of(owner, anchor_ids(self.prompt), self.whole, self.anchors.calls, self.manner.tools)
