"""`SessionPool`: many conversations on one backbone; each request goes to the cheapest session for it."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kamera.content import Message, Rendered
from kamera.edits import EditPolicy
from kamera.engines.hf import Backbone
from kamera.errors import UnknownSession
from kamera.ops import digest
from kamera.sessions.anchors import Anchors
from kamera.sessions.chat import ChatSession, conversations_of
from kamera.sessions.match import best_match, shaped_prompt
from kamera.sessions.modes import SessionMode, check_mode
from kamera.sessions.turn import Turn
from kamera.store import ChunkStore
from kamera.window import ReusePolicy

Stores = ChunkStore | Callable[[str], ChunkStore]
"""One tenant's store, or a function from a tenant to its store."""


SYSTEM_PROMPTS = 16
"""Number of system prompts per tenant that are kept prefilled for new sessions."""


@dataclass(frozen=True)
class PoolMetrics:
    """Counts of a pool's requests since its construction.

    ``by_id``, ``by_prefix``, ``by_edit``: the session was named, held a prefix of the prompt, or was the
    cheapest to edit. ``opened``: a new session. ``forked``: a matched session was busy, so a fork answered.
    ``too_little``: a session shared fewer than ``min_tokens``. ``tainted``: a session was skipped because its
    KV is conditioned on content outside its prompt. ``unknown``: the id did not exist. ``failed``: nothing
    was published. ``uncached``: the plain model answered. ``evicted_count``, ``evicted_bytes``: sessions
    evicted by either limit. ``anchors``: system prompts prefilled.
    """

    requests: int = 0
    by_id: int = 0
    by_prefix: int = 0
    by_edit: int = 0
    opened: int = 0
    forked: int = 0
    too_little: int = 0
    tainted: int = 0
    unknown: int = 0
    failed: int = 0
    uncached: int = 0
    evicted_count: int = 0
    evicted_bytes: int = 0
    anchors: int = 0


@dataclass(eq=False)
class _Entry:
    """A session, the digest of its tools, and a flag that a request is writing it."""

    session: ChatSession
    tools: str
    busy: bool = False
    bytes: int = 0


class SessionPool:
    """Conversations of many clients on one backbone.

    A request goes to the session of its id; without an id to the session with the longest prefix of its
    prompt, else to the one with the fewest tokens to prefill. A busy session is forked, never waited for.
    Sessions of one system prompt share its KV. Changes are published when the answer is complete; an error
    leaves the state unchanged.

    ``max_sessions`` and ``max_bytes`` (of `KameraWindow.memory`; shared tensors count in each session) limit
    the pool: the least recently used session is evicted. A session that shares fewer than ``min_tokens`` with
    a prompt is not used for it. ``store`` is one tenant's, or a function from a tenant to its store: tenants
    share neither sessions nor stored chunks. The other options are those of `ChatSession`. Thread-safe.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: Stores,
        *,
        max_sessions: int = 64,
        max_bytes: int | None = None,
        min_tokens: int = 100,
        mode: SessionMode = "auto",
        policy: ReusePolicy | None = None,
        edit_policy: EditPolicy | None = None,
        max_tokens: int | None = None,
        uncached: bool = False,
    ) -> None:
        if max_sessions < 1 or min_tokens < 0 or (max_bytes is not None and max_bytes < 1):
            raise ValueError(
                f"max_sessions={max_sessions}, max_bytes={max_bytes}, min_tokens={min_tokens}: keep 1 "
                "session and 1 byte or more, and share 0 tokens or more"
            )
        check_mode(mode)
        self.backbone = backbone
        self.max_sessions = max_sessions
        self.max_bytes = max_bytes
        self.min_tokens = min_tokens
        self._store = store
        self._window_options: dict[str, Any] = {"max_tokens": max_tokens, "policy": policy}
        self._options: dict[str, Any] = {"mode": mode, "edit_policy": edit_policy, "uncached": uncached}
        self._edit_policy = edit_policy
        self._conversations = conversations_of(backbone)
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # by tenant and id, oldest first
        self._anchors: dict[str, Anchors] = {}
        self._counts = dict.fromkeys((f.name for f in fields(PoolMetrics)), 0)

    def send(
        self,
        messages: str | Message | Sequence[Message],
        session_id: str | None = None,
        tenant: str | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> Turn:
        """Answer a conversation; `Turn.session_id` names the session that holds it then.

        ``messages`` as in `ChatSession.send`. A list is the whole history. Text and a single message are new
        messages only: they continue the session of an id, or begin a conversation without one. Raises
        UnknownSession for new messages to an unknown id, and the errors of `ChatSession.send`.
        """
        whose = self._tenant(tenant)
        name, entry = self._reserved(messages, session_id, whose, tools)
        try:
            turn = entry.session.send(messages, **options)
        except BaseException:
            with self._lock:
                self._counts["failed"] += 1
                entry.busy = False
                if entry.session.window is None and not entry.session.messages:
                    self._entries.pop((whose, name), None)  # it was opened for this request
            raise
        self._publish((whose, name), entry, turn)
        return Turn(turn.text, turn.tool_calls, turn.report, name)

    def session(self, session_id: str, tenant: str | None = None) -> ChatSession:
        """A fork of a session after its last complete answer. Raises UnknownSession."""
        with self._lock:
            entry = self._entries.get((self._tenant(tenant), session_id))
            if entry is None:
                raise UnknownSession(f"no session {session_id!r} in this pool: send the whole history")
            return entry.session.fork()

    def drop(self, session_id: str, tenant: str | None = None) -> None:
        """Remove a session; a busy one after its answer. Raises UnknownSession."""
        with self._lock:
            if self._entries.pop((self._tenant(tenant), session_id), None) is None:
                raise UnknownSession(f"no session {session_id!r} in this pool: it may have been evicted")

    def metrics(self) -> PoolMetrics:
        """The counts up to now."""
        with self._lock:
            anchors = sum(a.prefilled for a in self._anchors.values())
            return PoolMetrics(**{**self._counts, "anchors": anchors})

    def __len__(self) -> int:
        """Number of sessions, busy ones included."""
        return len(self._entries)

    # -- inside --------------------------------------------------------------------------------

    def _tenant(self, tenant: str | None) -> str:
        """Tenant of a request. Raises `ValueError` for another tenant than that of the pool's one store."""
        if not isinstance(self._store, ChunkStore):
            return tenant or ""
        if tenant not in (None, self._store.tenant):
            raise ValueError(
                f"tenant {tenant!r} in a pool whose store is of {self._store.tenant!r}: give the pool a "
                "function from a tenant to its store"
            )
        return self._store.tenant

    def _reserved(
        self,
        messages: str | Message | Sequence[Message],
        session_id: str | None,
        tenant: str,
        tools: Sequence[Any] | None,
    ) -> tuple[str, _Entry]:
        """A session reserved for this request, and its id."""
        kind = digest("kamera.pool.tools.v1", repr(tools))
        prompt = None
        if not isinstance(messages, str | Mapping):
            prompt = shaped_prompt(self._conversations, messages, tools, self._edit_policy)
        with self._lock:
            self._counts["requests"] += 1
            found = None if session_id is None else self._entries.get((tenant, session_id))
            if found is not None:
                self._counts["by_id"] += 1
            elif session_id is not None:
                self._counts["unknown"] += 1
                if isinstance(messages, str | Mapping):
                    raise UnknownSession(
                        f"no session {session_id!r} in this pool (evicted?): send the whole history"
                    )
            held = session_id
            if found is None and prompt is not None:
                held = self._matched(prompt, tenant, kind)
                found = None if held is None else self._entries[tenant, held]
            name = session_id or held or secrets.token_hex(8)
            if found is None:
                self._counts["opened"] += 1
                anchors = self._anchors_of(tenant)
                session = ChatSession.among(anchors, self._conversations, **self._options)
                entry = self._entries[tenant, name] = _Entry(session, kind)
            elif found.busy or name != held:
                self._counts["forked"] += found.busy
                name = secrets.token_hex(8) if name == held else name
                entry = self._entries[tenant, name] = _Entry(found.session.fork(), kind)
            else:
                entry = found
            entry.busy, entry.tools, entry.session.tools = True, kind, tools
            return name, entry

    def _matched(self, prompt: Rendered, tenant: str, kind: str) -> str | None:
        mine = {
            name: entry.session
            for (whose, name), entry in self._entries.items()
            if whose == tenant and entry.tools == kind
        }
        match = best_match(prompt, mine, self.min_tokens)
        self._counts["too_little"] += match.too_little
        self._counts["tainted"] += match.tainted
        if match.how is not None:
            self._counts[match.how] += 1
        return match.name

    def _anchors_of(self, tenant: str) -> Anchors:
        if tenant not in self._anchors:
            store = self._store if isinstance(self._store, ChunkStore) else self._store(tenant)
            if store.tenant != tenant:
                raise ValueError(
                    f"the store for tenant {tenant!r} is of {store.tenant!r}: open one of its own"
                )
            self._anchors[tenant] = Anchors(self.backbone, store, held=SYSTEM_PROMPTS, **self._window_options)
        return self._anchors[tenant]

    def _publish(self, key: tuple[str, str], entry: _Entry, turn: Turn) -> None:
        window = entry.session.window
        size = 0
        if self.max_bytes is not None and window is not None:
            size = self._anchors[key[0]].memory(window).total
        with self._lock:
            entry.busy, entry.bytes = False, size
            self._counts["uncached"] += turn.report.uncached is not None
            if self._entries.get(key) is entry:  # else it was dropped meanwhile
                self._entries.move_to_end(key)
            self._trim()

    def _trim(self) -> None:
        """Evict the least recently used sessions that are not busy."""
        idle = [key for key, entry in self._entries.items() if not entry.busy]
        size = sum(entry.bytes for entry in self._entries.values())
        for key in idle:
            too_many = len(self._entries) > self.max_sessions
            if not too_many and (self.max_bytes is None or size <= self.max_bytes):
                break
            self._counts["evicted_count" if too_many else "evicted_bytes"] += 1
            size -= self._entries.pop(key).bytes
