"""Whose conversation is it? Its last answers tell, where no other conversation of the pool ever got the same.

A session under ``amortize`` knows what its conversation dropped, so only that conversation may go on from it.
Without an id it is known by its tails: tenant, tools, its client's hint, system prompt, first words, and last
answers, with their number and without. A tail that was given twice is nobody's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kamera.content import Message, Rendered, text_of
from kamera.errors import KameraError, WindowFull, quote
from kamera.forks import lazy
from kamera.ops import digest
from kamera.sessions.anchors import Anchors
from kamera.sessions.branches import whole_history
from kamera.sessions.layout import system_ids
from kamera.sessions.modes import Manner
from kamera.sessions.tool_calls import CallForm
from kamera.store import ChunkStore

Stores = ChunkStore | Callable[[str], ChunkStore]
"""One tenant's store, or a function from a tenant to its store."""

ANSWERS = 3
"""Last answers in a tail: some agents say one thing again and again."""

_MARKS = 1 << 23  # bits, in one megabyte


def tenant_of(stores: Stores, tenant: str | None) -> str:
    """Tenant of a request. Raises `ValueError` for another tenant than that of the one store."""
    if not isinstance(stores, ChunkStore):
        return tenant or ""
    if tenant not in (None, stores.tenant):
        raise ValueError(
            f"tenant {quote(tenant)} in a pool whose store is of {stores.tenant!r}: give the pool a "
            "function from a tenant to its store"
        )
    return stores.tenant


def tails_of(
    owner: Sequence[str],
    anchor: Sequence[str],
    messages: Sequence[Message],
    calls: CallForm,
    tools: Sequence[Any] | None = None,
) -> frozenset[str]:
    """The tails of a history; none of one without an answer.

    ``anchor`` are ids of its system prompt, ``calls`` is the form of those in answers.
    """
    answers = [_text(m, calls, tools) for m in messages if m.get("role") == "assistant"]
    if not answers:
        return frozenset()
    first = next((text_of(m) for m in messages if m.get("role") == "user"), "")
    parts = ("kamera.tail.v1", *owner, "", *anchor, "", first, *answers[-ANSWERS:])
    return frozenset((digest(*parts), digest(*parts, "", str(len(answers)))))


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
    def full_history(self) -> Sequence[Message] | None:
        """The history with the messages; None if only the session has it. Raises UnknownTurn, ValueError."""
        if self.after is not None:
            return whole_history(self.anchors.branches.history(self.after), self.messages, branches=True)
        return None if isinstance(self.messages, str | Mapping) else self.messages

    @lazy
    def prompt(self) -> Rendered | None:
        """The prompt of the history; None if it cannot be cut, an error that its session raises.

        Raises WindowFull for one that no session could hold.
        """
        if self.full_history is None:
            return None
        try:
            shaped_history = self.manner.apply_policy(self.full_history, 0)
            return self.manner.render(self.anchors.conversations, shaped_history)
        except WindowFull:
            if self.manner.uncached or self.manner.edit_policy is not None:
                return None
            raise
        except (KameraError, ValueError):
            return None

    @lazy
    def tails(self) -> frozenset[str]:
        """The tails of the history (`kamera.sessions.owners`)."""
        if self.full_history is None or self.prompt is None:
            return frozenset()
        owner = (self.tenant, self.manner.kind, self.hint)
        return tails_of(
            owner, system_ids(self.prompt), self.full_history, self.anchors.calls, self.manner.tools
        )


class Tails:
    """Marks of the tails of all answers of a pool. Some tails share theirs, and count as given before."""

    def __init__(self) -> None:
        self._marks = bytearray(_MARKS // 8)

    def give(self, tails: Collection[str]) -> frozenset[str]:
        """Note an answer's tails; those of them that no answer had before."""
        new = frozenset(tail for tail in tails if not all(map(self._is_marked, _places(tail))))
        for at in chain.from_iterable(map(_places, new)):
            self._marks[at // 8] |= 1 << at % 8
        return new

    def _is_marked(self, at: int) -> bool:
        return bool(self._marks[at // 8] >> at % 8 & 1)


def _places(tail: str) -> list[int]:
    return [int(tail[8 * i : 8 * i + 8], 16) % _MARKS for i in range(4)]


def _text(message: Message, form: CallForm, tools: Sequence[Any] | None) -> str:
    """An answer, whether its calls are text or apart, and their arguments a text or not."""
    text, calls = form.parse(text_of(message), tools)
    functions = [_plain(call.get("function")) for call in (*calls, *(message.get("tool_calls") or ()))]
    return f"{text.strip()}\0{json.dumps(functions, sort_keys=True, default=str)}"


def _plain(function: Any) -> Any:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (KeyError, TypeError, ValueError, RecursionError):
        return function
