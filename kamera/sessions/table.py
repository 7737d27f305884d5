"""The sessions of a pool in memory: whose conversation a prompt is of, and which is the cheapest for it.

A conversation is known by its id, by its last answers where no other of the pool ever got the same, or by
what its window holds. A session under ``amortize`` knows what its conversation dropped, so only that
conversation may go on from it: without an id it is known by its tails (tenant, tools, its client's hint,
system prompt, first words, and last answers, with their number and without). A tail that was given twice is
nobody's.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

from kamera.content import Message, Rendered, common_prefix, text_of
from kamera.edits import difference
from kamera.errors import KameraError, WindowFull, quote
from kamera.forks import lazy
from kamera.ops import digest
from kamera.sessions.anchors import Anchors, whole_history
from kamera.sessions.chat import ChatSession
from kamera.sessions.grammar import CallForm
from kamera.sessions.layout import (
    OF_THE_PROMPT,
    Layout,
    Manner,
    SessionMode,
    count_anchor_segments,
    laxest_treatment,
    system_ids,
    worth_to_others,
)
from kamera.store import ChunkStore
from kamera.trust import Guarantee, OnLeave
from kamera.window import GLUE

_saved_tokens = attrgetter("saved_tokens")


@dataclass(frozen=True, eq=False)
class Candidate:
    """What a choice needs of a session, in memory or saved.

    ``guarantee`` is the weakest in its window; ``on_leave`` the least strict treatment that an edit of it may
    come to; ``tails`` those of its history that are its own (`kamera.sessions.table`).
    """

    layout: Layout
    guarantee: Guarantee
    on_leave: OnLeave
    tails: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Match:
    """The chosen session, the reason for it, the tokens that it saves, and counts of the rejected ones."""

    name: str | None = None
    how: Literal["by_owner", "by_prefix", "by_edit"] | None = None
    saved_tokens: int = 0
    too_little: int = 0
    tainted: int = 0


def candidate(
    session: ChatSession, mode: SessionMode, tails: frozenset[str] = frozenset()
) -> Candidate | None:
    """The session as a candidate for a request under ``mode``; None if it has no window."""
    state = session.state  # another thread may replace it
    layout, window = state.layout, state.window
    if layout is None or window is None:
        return None
    policy = window.policy
    on_leave = laxest_treatment(mode, policy.minimum)
    return Candidate(layout, worth_to_others(window), on_leave, tails)


def best_match(
    prompt: Rendered, sessions: Mapping[str, Candidate], min_tokens: int, tails: frozenset[str] = frozenset()
) -> Match:
    """The session with the longest prefix of ``prompt``, else the one with the fewest tokens to prefill.

    A prompt that goes on from all that a session holds goes to it. Any other session has to save at least
    ``min_tokens`` after the system prompt; where none does, one that holds as many of the prompt's tokens at
    other places is edited: it is the same conversation, and a second session would only take memory. Of
    equals the first is chosen. A session whose KV is conditioned on content outside its prompt (a survivor of
    an edit) serves its owner only, whom the prompt's ``tails`` tell. Where an edit would leave such KV, it
    is made for its owner; for whom the tails do not tell all behind the change is prefilled
    (`SessionPool`). A new session may still begin with what another has of its prompt
    (`kamera.sessions.layout`).
    """
    least, tainted = max(min_tokens, 1), 0
    best = dict.fromkeys(("prefix", "edit", "alike"), Match(saved_tokens=-1))
    for name, session in sessions.items():
        if system_ids(session.layout.prompt) != system_ids(prompt):
            continue
        cut_prompt = prompt.cut_as(session.layout.prompt)
        prefix, size = _prefix(session.layout, cut_prompt)
        knows = session.guarantee not in OF_THE_PROMPT
        is_kept = knows or (prefix < size and session.on_leave == "keep")
        if is_kept and tails & session.tails and _goes_on(session.layout.prompt, cut_prompt):
            return Match(name, "by_owner")
        if knows:
            tainted += 1
        elif prefix == size:
            best["prefix"] = max(best["prefix"], Match(name, "by_prefix", prefix), key=_saved_tokens)
        else:
            both = _common(session.layout, cut_prompt)
            edit = both if session.on_leave == "repair" else prefix  # "keep" is for its owner alone
            best["edit"] = max(best["edit"], Match(name, "by_edit", edit), key=_saved_tokens)
            best["alike"] = max(best["alike"], Match(name, "by_edit", both), key=_saved_tokens)
    for way, enough in (("prefix", 1), ("edit", least), ("alike", least)):
        if best[way].saved_tokens >= enough:
            return replace(best[way], tainted=tainted)
    has_match = any(one.name is not None for one in best.values())
    return Match(too_little=int(has_match), tainted=tainted)


def _goes_on(old_prompt: Rendered, prompt: Rendered) -> bool:
    """True if a prompt has nothing of its own in front of its last answer but short texts: placeholders."""
    answer_indices = [i for i, segment in enumerate(prompt.segments) if segment.role == "assistant"]
    last = answer_indices[-1] if answer_indices else 0
    while last > 0 and prompt.segments[last - 1].role == "assistant":
        last -= 1
    old_ids = set(old_prompt.segment_ids())
    return all(s.id in old_ids or (s.media is None and s.num_tokens < GLUE) for s in prompt.segments[:last])


def _prefix(layout: Layout, prompt: Rendered) -> tuple[int, int]:
    """Tokens after the anchor: in the common prefix of window and prompt, and in the window altogether."""
    segments, anchor = layout.prompt.segments, count_anchor_segments(prompt)
    last = layout.runs[-1][1] if layout.runs else 0
    same = min(last, common_prefix(layout.prompt.segment_ids(), prompt.segment_ids()))
    shared_tokens, window_tokens = (sum(s.num_tokens for s in segments[anchor:stop]) for stop in (same, last))
    return shared_tokens, window_tokens


def _common(layout: Layout, prompt: Rendered) -> int:
    """Tokens after the anchor that both hold, at any position."""
    change = difference(layout.prompt, prompt)
    first = count_anchor_segments(prompt)
    both = [j for _, j in (*change.kept, *change.moved) if j >= first]
    return sum(prompt.segments[j].num_tokens for j in both)


# -- in memory -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """A session, a flag that a request is writing it, and the tails that its last answer alone has.

    ``has_client_id``: its client gave the id, and is known by it, not by tails.
    """

    session: ChatSession
    busy: bool = False
    bytes: int = 0
    tails: frozenset[str] = frozenset()
    has_client_id: bool = False
    how: str = "opened"
    """How its last request found it, as `PoolMetrics` calls that."""


Entries = OrderedDict[tuple[str, str], Entry]
"""By tenant and id."""


def candidates(entries: Entries, tenant: str, manner: Manner) -> dict[str, Candidate]:
    """Sessions that a prompt under ``manner`` may go to, those with its tools, the last used first."""
    sessions: dict[str, Candidate] = {}
    for (whose, name), entry in reversed(entries.items()):
        if whose == tenant and entry.session.manner.kind == manner.kind:
            tails = frozenset[str]() if entry.has_client_id else entry.tails
            session_candidate = candidate(entry.session, manner.mode, tails)
            sessions |= {} if session_candidate is None else {name: session_candidate}
    return sessions


def evict_sessions(entries: Entries, most: int, most_bytes: int | None) -> Counter[tuple[str, str]]:
    """Evict the least recently used sessions that are not busy, down to both limits.

    How many of which tenant, for which of them.
    """
    counts = Counter[tuple[str, str]]()
    size = sum(entry.bytes for entry in entries.values())
    for key in [key for key, entry in entries.items() if not entry.busy]:
        too_many = len(entries) > most
        if not too_many and (most_bytes is None or size <= most_bytes):
            break
        counts[key[0], "evicted_count" if too_many else "evicted_bytes"] += 1
        size -= entries.pop(key).bytes
    return counts


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
            shaped_history, _ = self.manner.shape(self.anchors.conversations, self.full_history, 0)
            return self.manner.render(self.anchors.conversations, shaped_history)
        except WindowFull:
            if self.manner.uncached or self.manner.edit_policy is not None:
                return None
            raise
        except (KameraError, ValueError):
            return None

    @lazy
    def tails(self) -> frozenset[str]:
        """The tails of the history (`kamera.sessions.table`)."""
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
