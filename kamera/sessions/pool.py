"""`SessionPool`: many conversations on one backbone; each request goes to the cheapest session for it."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kamera import forks
from kamera.content import Message, Rendered, own_messages, shown_message
from kamera.edits import Directive, EditPolicy
from kamera.engines import Account, Completes, HasEngine, Usage, engine_of
from kamera.errors import KameraError, SessionConflict, UnknownSession, UnsupportedByEngine, quote
from kamera.ops import digest
from kamera.patches import background_of
from kamera.sessions.anchors import SYSTEM_PROMPTS, Anchors, Branches, check_count, conversations_of
from kamera.sessions.chat import ChatSession, open_session
from kamera.sessions.engine_turns import anchors_over
from kamera.sessions.grammar import Grammar
from kamera.sessions.layout import KEPT, Manner, SessionMode, default_policy, system_ids
from kamera.sessions.saved import SavedSessions, check_saving
from kamera.sessions.stream import Stream, Turn, TurnReport, refuse_own_options
from kamera.sessions.table import (
    Entries,
    Entry,
    Incoming,
    Match,
    Stores,
    Tails,
    best_match,
    candidates,
    evict_sessions,
    tails_of,
    tenant_of,
)
from kamera.store import ChunkStore, check_store, parse_size
from kamera.trust import ReusePolicy, check_policy
from kamera.window import Event, Listener, Trace

logger = logging.getLogger("kamera.sessions")

_MOST = 256  # system prompts whose changes are followed
_CHANGES = 3
"""Prompts that differ in numbers alone, from which on they are told of."""


class Clocks:
    """Warns once of each system prompt that comes again and again with other numbers."""

    def __init__(self) -> None:
        self._forms: OrderedDict[str, set[str]] = OrderedDict()

    def note_system_prompt(self, tenant: str, messages: Sequence[Message]) -> None:
        """Note the system prompt of a request."""
        first = messages[0].get("content") if messages and messages[0].get("role") == "system" else None
        if not isinstance(first, str) or not (numbers := re.findall(r"\d+", first)):
            return
        number_digests = self._forms.setdefault(digest(tenant, re.sub(r"\d+", "0", first)), set())
        if len(number_digests) < _CHANGES:
            number_digests.add(digest(*numbers))
            if len(number_digests) == _CHANGES:
                logger.warning(
                    "the system prompt changes in its numbers alone from request to request (%s): all behind "
                    "it is prefilled each time; put a clock or counter into the last message",
                    quote(first[-60:]),
                )
        while len(self._forms) > _MOST:
            self._forms.popitem(last=False)


Traces = str | os.PathLike[str] | Callable[[str], Listener]
"""A file for all tenants, or a function from a tenant to the listener of its windows."""

_SESSION: ContextVar[str] = ContextVar("session", default="")


class Telling:
    """A listener of a tenant's windows. It passes on what they do in a turn of a session, under its id."""

    def __init__(self, traces: Traces, tenant: str) -> None:
        self._to = traces(tenant) if callable(traces) else Trace(traces)
        self._prefix = f"{tenant}: " if tenant and not callable(traces) else ""

    def __call__(self, event: Event) -> None:
        if session := _SESSION.get():  # else it is background work, which no turn may ever show
            self._to(replace(event, session=self._prefix + session))


@contextmanager
def as_session(session: str) -> Iterator[None]:
    """Context of a turn of a session, in this thread."""
    token = _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(token)


@dataclass(frozen=True)
class PoolMetrics:
    """Counts of a pool's requests since its construction.

    ``by_id``, ``by_owner``, ``by_prefix``, ``by_edit``: the session was named, is that of the conversation
    that goes on, held a prefix of the prompt, or was the cheapest to edit. ``opened``: a new session.
    ``resumed``: a saved session was read first. ``forked``: a matched session was busy, so a fork answered.
    ``too_little``: a session shared fewer than ``min_tokens``.
    ``tainted``: a session was skipped because its KV is conditioned on content outside its prompt.
    ``unknown``: the id did not exist. ``failed``: nothing was published. ``uncached``: the plain model
    answered. ``saved``, ``unsaved``: saves that were completed, and that failed. ``evicted_count``,
    ``evicted_bytes``: sessions evicted from memory by either limit. ``evicted_saved``: saved sessions removed
    by theirs. ``anchors``: system prompts prefilled. ``dropped``: pieces of the backbone's background work
    that were dropped over its bytes. ``anticipated``: turns that began with what was prepared for them;
    ``misjudged``: turns for which something else was prepared.
    """

    requests: int = 0
    by_id: int = 0
    by_owner: int = 0
    by_prefix: int = 0
    by_edit: int = 0
    opened: int = 0
    resumed: int = 0
    forked: int = 0
    too_little: int = 0
    tainted: int = 0
    unknown: int = 0
    failed: int = 0
    uncached: int = 0
    saved: int = 0
    unsaved: int = 0
    evicted_count: int = 0
    evicted_bytes: int = 0
    evicted_saved: int = 0
    anchors: int = 0
    dropped: int = 0
    anticipated: int = 0
    misjudged: int = 0


def turn_counts(report: TurnReport) -> dict[str, int]:
    """What an answered turn adds to the counts."""
    return {
        "uncached": report.uncached is not None,
        "anticipated": bool(report.anticipated),
        "misjudged": report.anticipated == 0,
    }


def turn_line(name: str, how: str, turn: Turn) -> str:
    """A line of a log: how the session ``name`` was matched, and what of the prompt was at hand, and why not.

    No content is in it.
    """
    report, (prompt, cached, _) = turn.report, turn.usage
    found, missed = Counter[str](), Counter[str]()
    for one in report.admissions:
        if one.tier == "none":
            missed[one.reason.partition(";")[0]] += one.tokens - one.head
        else:
            found[one.tier] += one.tokens
    served = [f"{tokens} {tier}" for tier, tokens in found.most_common()] or [report.guarantee]
    if how == "opened" and not report.admissions:
        how += " on a known system prompt" if cached else " on nothing known"
    line = f"session {name} {how}: {cached} of {prompt} tokens at hand ({', '.join(served)})"
    return line + "".join(f"; {tokens} prefilled: {reason}" for reason, tokens in missed.most_common())


class SessionPool:
    """Conversations of many clients on one backbone.

    A request goes to the session of its id; without an id to that of the conversation that it goes on, as its
    last answers tell, else to the session with the longest prefix of its prompt, else to the one with the
    fewest tokens to prefill. A busy session is forked, never waited for.
    Sessions of one system prompt share its KV. Changes are published when the answer is complete; an error
    leaves the state unchanged.

    ``max_sessions`` and ``max_bytes`` (or ``"8GiB"``, of `KameraWindow.memory`; what sessions share counts in
    each) limit
    the pool: the least recently used session is evicted. A prompt that does not go on from all that a session
    holds goes to it only if they share ``min_tokens``. ``store`` is one tenant's, or a function from a tenant
    to its store: tenants share neither sessions nor stored chunks. The other options are those of
    `ChatSession`; with ``reuse`` a segment that any session of a tenant has stored is found by all of its
    sessions. Thread-safe.

    ``save`` is a directory to which each session is saved after each complete answer, by a thread behind the
    answers: a killed process loses at most a session's last turn. A request finds saved sessions as it finds
    those in memory, also those of another process, and evicted ones (docs/sessions.md). If another process
    continues a session at the same time, the branch that is saved second stays in memory alone, and `flush`
    raises SessionConflict. Over ``max_saved_bytes`` the sessions saved
    longest ago are removed from it.

    ``anticipates``: after each answer the session prepares its next prompt (`ChatSession.anticipate`).
    ``trace`` is a file of what the sessions' windows do, under the sessions' ids (`kamera view`), or a
    function from a tenant to a listener of its events. ``branches`` holds each tenant's turns by their ids;
    two pools may share one. ``engine`` as for `ChatSession`; what it says to anticipate are prompts of low
    priority, whose KV it stores.
    """

    def __init__(
        self,
        backbone: HasEngine,
        store: Stores,
        *,
        max_sessions: int = 64,
        max_bytes: int | str | None = None,
        min_tokens: int = 100,
        mode: SessionMode = "auto",
        policy: ReusePolicy | None = None,
        edit_policy: EditPolicy | None = None,
        max_tokens: int | None = None,
        uncached: bool = False,
        reuse: bool = False,
        save: str | Path | None = None,
        max_saved_bytes: int | str | None = None,
        anticipates: bool = True,
        trace: Traces | None = None,
        branches: dict[str, Branches] | None = None,
        engine: Completes | None = None,
    ) -> None:
        if engine is not None and (uncached or reuse or trace is not None or save is not None):
            raise UnsupportedByEngine(
                "uncached, reuse, save, trace: sessions over an engine have none of them"
            )
        check_count("max_sessions", max_sessions, 1)
        check_count("min_tokens", min_tokens, 0)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens, 1)
        saved_limit = None if max_saved_bytes is None else parse_size(max_saved_bytes, "max_saved_bytes")
        check_saving(save, saved_limit)
        check_policy(policy)
        self.backbone = engine_of(backbone)
        if not callable(store):
            check_store(store)
        self.max_sessions, self.min_tokens = max_sessions, min_tokens
        self.max_bytes = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
        if self.max_bytes == 0:
            raise ValueError("max_bytes=0 holds no session: give 1 byte or more")
        self.anticipates = anticipates
        self._store = store
        self._manner = Manner(None, mode, edit_policy, uncached, reuse)
        policy = default_policy(mode, reuse) if policy is None and engine is None else policy
        self._traces, self._branches, self._engine = trace, {} if branches is None else branches, engine
        options = {"max_tokens": max_tokens, "policy": policy, "prompt_limit": SYSTEM_PROMPTS}
        if self.max_bytes is not None:
            options["trail_bytes"] = min(KEPT, self.max_bytes // 8)
        self._windows: dict[str, Any] = {**options, "conversations": conversations_of(self.backbone)}
        self._tenants: dict[str, Anchors] = {}
        self._saves = None if save is None else SavedSessions(save, saved_limit)
        self._lock = forks.Lock()
        self._account = Account()
        self._entries = Entries()  # the last used one at the end
        self._tails, self._clocks = Tails(), Clocks()
        self._counts = Counter[tuple[str, str]]()  # by tenant and name

    def send(
        self,
        messages: str | Message | Sequence[Message],
        session_id: str | None = None,
        tenant: str | None = None,
        *,
        after: str | None = None,
        tools: Sequence[Any] | None = None,
        stream: Stream | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        scratch: Sequence[Message] = (),
        directives: Sequence[Directive] = (),
        mode: SessionMode | None = None,
        hint: str = "",
        told: Callable[[Turn], Message] | None = None,
        **options: Any,
    ) -> Turn:
        """Answer a conversation; `Turn.session_id` names the session that holds it then.

        ``messages`` as in `ChatSession.send`. A list is the whole history. Text and a single message are new
        messages only: they continue the session of an id, or begin a conversation without one. ``after`` is a
        turn of any session, as in `ChatSession.send`: if a session has gone on from it, another one answers,
        unless an id is given. ``hint`` is a name that its client gives to some conversations: those of others
        are not taken for them. ``told`` makes of the turn its answer as the client knows it, with its calls
        apart say: what goes on ``after`` it finds that. Raises UnknownSession for new messages to an unknown
        id, the errors of `ChatSession.send`, and for new messages to a saved session those of
        `ChatSession.load`.
        """
        refuse_own_options(options, SessionPool)
        self.backbone.check_sampling(options)
        if isinstance(messages, str):
            messages = self._windows["conversations"].spoken({"role": "user", "content": messages})
        messages = own_messages(messages, self.backbone.builder.limits)  # read once, by whichever session
        whose = tenant_of(self._store, tenant)
        options |= {"stream": stream, "seed": seed, "logprobs": logprobs, "grammar": grammar}
        options |= {"scratch": scratch, "after": after, "directives": directives, "mode": mode}
        with self._account.count_now(self.backbone):
            manner = replace(self._manner, tools=tools, anticipates=self.anticipates)
            incoming = Incoming(self._anchors_of(whose), manner, messages, session_id, after, hint)
            return self._send(incoming, options, told)

    def _send(
        self, incoming: Incoming, options: dict[str, Any], told: Callable[[Turn], Message] | None
    ) -> Turn:
        name, entry = self._reserve(incoming)
        try:
            with as_session(name):
                turn = entry.session.send(incoming.messages, **options)
                if told is not None:
                    incoming.anchors.branches.retell(turn.turn_id, told(turn))
                if self._saves is not None:
                    self._saves.note(turn.turn_id, incoming.anchors)
        except BaseException:
            with self._lock:
                self._counts[incoming.tenant, "failed"] += 1
                entry.busy = False
                if not entry.session.state.changes:
                    self._entries.pop((incoming.tenant, name), None)  # it was opened for this request
            raise
        how = entry.how  # of this request: from the next line on another may take the session
        self._end_reservation((incoming.tenant, name), entry, turn, incoming.hint)
        if logger.isEnabledFor(logging.INFO):
            logger.info(turn_line(name, how, turn))
        return replace(turn, session_id=name)

    def session(self, session_id: str, tenant: str | None = None) -> ChatSession:
        """A fork of a session after its last complete answer.

        Raises UnknownSession, and for a saved one the errors of `ChatSession.load`.
        """
        whose = tenant_of(self._store, tenant)
        self._let_go(whose, session_id)
        with self._lock:
            entry = self._entries.get((whose, session_id))
            session = None if entry is None else entry.session.fork()
        with self._account.count_now(self.backbone):
            if session is None and self._saves is not None:
                session = self._saves.load(session_id, self._anchors_of(whose), self._manner)
        if session is None:
            raise UnknownSession(f"no session {quote(session_id)} in this pool: send the whole history")
        return session

    def history(self, turn_id: str, tenant: str | None = None) -> list[dict[str, Any]]:
        """A copy of the messages up to a turn's answer. Raises UnknownTurn."""
        branches = self._anchors_of(tenant_of(self._store, tenant)).branches
        return [shown_message(message) for message in branches.history(turn_id)]

    def delete(self, turn_id: str, tenant: str | None = None) -> None:
        """`ChatSession.delete` in all sessions, saved ones too. Raises UnknownTurn, and as `edit`."""
        whose = tenant_of(self._store, tenant)
        anchors = self._anchors_of(whose)
        saved_names = [] if self._saves is None else self._saves.names_of(turn_id, anchors)
        with self._lock:
            own = [(name, entry) for (of, name), entry in self._entries.items() if of == whose]
            entries = [(n, e) for n, e in own if anchors.branches.goes_through(e.session.state.last, turn_id)]
        if any(entry.busy for _, entry in entries):
            raise SessionConflict(f"turn {quote(turn_id)} is being gone on from: delete it after that answer")
        anchors.branches.remove_turn(turn_id)
        for name in dict.fromkeys([name for name, _ in entries] + saved_names):  # nor does it come back
            with self._change(name, whose) as session:
                session.delete(turn_id)

    def edit(
        self, session_id: str, directives: Sequence[Directive], tenant: str | None = None, **options: Any
    ) -> TurnReport:
        """`ChatSession.edit` of a session. Raises UnknownSession, SessionConflict while it answers."""
        with self._change(session_id, tenant) as session:
            return session.edit(directives, **options)

    def drop(self, session_id: str, tenant: str | None = None) -> None:
        """Remove a session, saved ones too; a busy one after its answer. Raises UnknownSession."""
        whose = tenant_of(self._store, tenant)
        with self._lock:
            is_removed = self._entries.pop((whose, session_id), None) is not None
        if self._saves is not None:
            is_removed = self._saves.remove(whose, session_id) or is_removed
        if not is_removed:
            raise UnknownSession(f"no session {quote(session_id)} in this pool: it may have been evicted")

    def flush(self) -> None:
        """Wait for all background work, and until all sessions are saved.

        Raises the first error that kept a session from being saved since the last call; SessionConflict for
        one that another process had continued.
        """
        background_of(self.backbone).flush()
        if self._saves is not None:
            self._saves.flush()

    def usage(self) -> Usage:
        """The model work of all sessions of this pool, now and later. After `flush` it equals hooks."""
        return self._account.usage

    def list_saved(self, tenant: str | None = None) -> list[str]:
        """Ids of a tenant's sessions on the disk, those of other processes too; none without ``save``."""
        return [] if self._saves is None else self._saves.names(tenant_of(self._store, tenant))

    def metrics(self, tenant: str | None = None) -> PoolMetrics:
        """The counts up to now, of all tenants, or of one: its own alone, and nothing of the backbone's."""
        counts = Counter[str]()
        with self._lock:
            for (whose, name), count in [*self._counts.items(), *self._saved_counts()]:
                counts[name] += count if tenant in (None, whose) else 0
            anchors = [a for whose, a in self._tenants.items() if tenant in (None, whose)]
        counts["anchors"] = sum(a.prefill_count for a in anchors)
        counts["dropped"] = 0 if tenant is not None else background_of(self.backbone).dropped
        return PoolMetrics(**counts)

    def count_sessions(self, tenant: str) -> int:
        """Number of a tenant's sessions, busy ones included."""
        with self._lock:
            return sum(whose == tenant for whose, _ in self._entries)

    def __len__(self) -> int:
        """Number of sessions, busy ones included."""
        return len(self._entries)

    # -- inside --------------------------------------------------------------------------------

    def _saved_counts(self) -> list[tuple[tuple[str, str], int]]:
        return [] if self._saves is None else [*dict(self._saves.counts).items()]

    def _anchors_of(self, tenant: str) -> Anchors:
        """What a tenant's sessions share. Raises ValueError for a store of another tenant."""
        if tenant in self._tenants:
            return self._tenants[tenant]
        store = self._store if isinstance(self._store, ChunkStore) else self._store(tenant)
        if store.tenant != tenant:
            raise ValueError(
                f"the store for tenant {quote(tenant)} is of {quote(store.tenant)}: open one of its own"
            )
        listener = None if self._traces is None else Telling(self._traces, tenant)
        branches = self._branches.setdefault(tenant, Branches())
        options = {**self._windows, "branches": branches, "listener": listener}
        own = anchors_over(self._engine, self.backbone, store, **options)
        anchors = self._tenants.setdefault(tenant, own)
        if anchors is own and self._saves is not None:
            branches.archives.append(partial(self._saves.find_turn, anchors=anchors))
        return anchors

    @contextmanager
    def _change(self, session_id: str, tenant: str | None) -> Iterator[ChatSession]:
        """A session, reserved for a change that is then published. Raises UnknownSession, SessionConflict."""
        whose, session = tenant_of(self._store, tenant), self.session(session_id, tenant)
        with self._lock:
            entry = self._entries.setdefault((whose, session_id), Entry(session))
            if entry.busy:
                raise SessionConflict(
                    f"session {quote(session_id)} is in the midst of an answer: edit it after that"
                )
            entry.busy = True
        try:
            with self._account.count_now(self.backbone), as_session(session_id):
                yield entry.session
        finally:
            self._end_reservation((whose, session_id), entry, None, "")

    def _reserve(self, incoming: Incoming) -> tuple[str, Entry]:
        """A session reserved for this request, and its id."""
        tenant, session_id = incoming.tenant, incoming.session_id
        _ = incoming.manner.kind  # tools without a digest are refused before anything is reserved
        prompt, tails = incoming.prompt, incoming.tails  # made before the lock is held
        if incoming.full_history is not None and not incoming.manner.reuse:
            self._clocks.note_system_prompt(tenant, incoming.full_history)
        id_and_session = self._resume(incoming)
        with self._lock:
            self._counts[tenant, "requests"] += 1
            if id_and_session is not None:
                self._counts[tenant, "resumed"] += 1
                self._entries.setdefault((tenant, id_and_session[0]), Entry(id_and_session[1]))
            entry = None if session_id is None else self._entries.get((tenant, session_id))
            if entry is not None:
                self._counts[tenant, "by_id"] += 1
            elif session_id is not None:
                self._counts[tenant, "unknown"] += 1
                if incoming.full_history is None:
                    raise UnknownSession(
                        f"no session {quote(session_id)} in this pool (evicted?): send the whole history"
                    )
            matched_id, how = session_id, "opened" if entry is None else "by_id"
            if entry is None and prompt is not None:
                match = self._match(incoming, prompt, tails)
                matched_id, how = match.name, match.how or "opened"
                entry = None if matched_id is None else self._entries[tenant, matched_id]
            name = session_id or matched_id or secrets.token_hex(8)
            if entry is None or entry.busy or name != matched_id:  # another session answers
                state = None
                if entry is not None:
                    state = entry.session.state
                    name = secrets.token_hex(8) if name == matched_id else name
                    self._counts[tenant, "forked"] += entry.busy
                self._counts[tenant, "opened"] += entry is None
                session = open_session(incoming.anchors, incoming.manner, state)
                entry = self._entries[tenant, name] = Entry(session)
            manner = incoming.manner
            was_edited = how != "by_id" and entry.session.manner.mode == "forget"
            if manner.mode == "amortize" and (how == "by_edit" or was_edited):
                manner = replace(manner, mode="forget")  # by whom is not told, now or in an earlier request
            entry.busy, entry.session.manner, entry.how = True, manner, how
            entry.has_client_id = entry.has_client_id or session_id is not None
            return name, entry

    def _match(self, incoming: Incoming, prompt: Rendered, tails: frozenset[str]) -> Match:
        sessions = candidates(self._entries, incoming.tenant, incoming.manner)
        if incoming.after is None:
            match = best_match(prompt, sessions, self.min_tokens, tails)
        else:
            last = {self._entries[incoming.tenant, name].session.state.last: name for name in sessions}
            name = last.get(incoming.after)
            match = Match(name, None if name is None else "by_owner")
        self._counts[incoming.tenant, "too_little"] += match.too_little
        self._counts[incoming.tenant, "tainted"] += match.tainted
        if match.how is not None:
            self._counts[incoming.tenant, match.how] += 1
        return match

    def _resume(self, incoming: Incoming) -> tuple[str, ChatSession] | None:
        """The saved session that a request goes to, if that is better than any in memory; its id."""
        if self._saves is None:
            return None
        tenant, name, prompt = incoming.tenant, incoming.session_id, incoming.prompt
        anchors, manner = incoming.anchors, incoming.manner
        self._let_go(tenant, name)
        with self._lock:
            memory_ids = {name for whose, name in self._entries if whose == tenant}
            sessions = candidates(self._entries, tenant, manner)
            lasts = {self._entries[tenant, name].session.state.last for name in sessions}
        if name in memory_ids:
            return None
        try:
            if name is None and incoming.after is not None and incoming.after not in lasts:
                names = self._saves.names_of(incoming.after, anchors)
                name = next((n for n in names if n not in memory_ids), None)
            session = None if name is None else self._saves.load(name, anchors, manner)
            if session is None and prompt is not None and incoming.after is None:
                saves = self._saves.candidates(anchors, manner)
                saves = {name: save for name, save in saves.items() if name not in memory_ids}
                name = best_match(prompt, sessions | saves, self.min_tokens).name
                session = self._saves.load(name, anchors, manner) if name in saves else None
        except KameraError:
            if prompt is None:
                raise
            return None  # the whole history is here: it is prefilled
        return None if name is None or session is None else (name, session)

    def _let_go(self, tenant: str, session_id: str | None) -> None:
        """Forget sessions that another process has continued: all that was said here is on the disk, too."""
        if self._saves is None:
            return
        with self._lock:
            mine = [(k, e) for k, e in self._entries.items() if k[0] == tenant and session_id in (None, k[1])]
        for key, entry in mine:
            state = entry.session.state
            if self._saves.is_overtaken(*key, state.changes):
                with self._lock:
                    if self._entries.get(key) is entry and not entry.busy and entry.session.state is state:
                        del self._entries[key]

    def _end_reservation(self, key: tuple[str, str], entry: Entry, turn: Turn | None, hint: str) -> None:
        """End the reservation of a session that has answered, or changed."""
        state, manner, anchors = entry.session.state, entry.session.manner, self._anchors_of(key[0])
        anchor = () if state.layout is None else system_ids(state.layout.prompt)
        tails = tails_of((key[0], manner.kind, hint), anchor, state.messages, anchors.calls, manner.tools)
        try:
            entry.bytes = 0 if self.max_bytes is None else anchors.memory(state.window).total
            if self._saves is not None:  # while it is reserved: saves of one session keep their order
                self._saves.save(*key, entry.session.fork(), anchors)
        finally:
            with self._lock:
                entry.busy = False
                if turn is not None:  # an edit of messages takes no answer back from its owner
                    for other in self._entries.values():
                        other.tails -= tails
                    entry.tails = self._tails.give(tails)
                    self._counts.update({(key[0], n): c for n, c in turn_counts(turn.report).items()})
                if self._entries.get(key) is entry:  # else it was dropped meanwhile
                    self._entries.move_to_end(key)
                is_dropped = key not in self._entries
                left = sum(anchors.trail.nbytes for anchors in self._tenants.values())
                limit = None if self.max_bytes is None else self.max_bytes - left
                self._counts.update(evict_sessions(self._entries, self.max_sessions, limit))
        if is_dropped and self._saves is not None:
            self._saves.remove(*key)
