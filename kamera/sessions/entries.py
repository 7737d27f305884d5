"""The sessions of a pool in memory, the last used one at the end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kamera import forks
from kamera.sessions.chat import ChatSession
from kamera.sessions.match import Candidate, candidate
from kamera.sessions.owners import Tails
from kamera.sessions.saved import SavedSessions


@dataclass(eq=False)
class Entry:
    """A session, the digest of its tools, a flag that a request is writing it, and the tails of its history.

    ``named``: its client gave the id, and is known by it.
    """

    session: ChatSession
    tools: str
    busy: bool = False
    bytes: int = 0
    tails: frozenset[str] = frozenset()
    named: bool = False


Entries = OrderedDict[tuple[str, str], Entry]
"""By tenant and id."""


def candidates(entries: Entries, tenant: str, kind: str, tails: Tails) -> dict[str, Candidate]:
    """Sessions that a prompt with tools of ``kind`` may go to, the last used first."""
    found: dict[str, Candidate] = {}
    for (whose, name), entry in reversed(entries.items()):
        if whose == tenant and entry.tools == kind:
            held = candidate(entry.session, frozenset() if entry.named else tails.own(entry.tails))
            found |= {} if held is None else {name: held}
    return found


def let_go(
    entries: Entries, lock: forks.Lock, saved: SavedSessions | None, tenant: str, session_id: str | None
) -> None:
    """Forget sessions that another process has continued: all that was said here is on the disk, too."""
    if saved is None:
        return
    with lock:
        mine = [(k, e) for k, e in entries.items() if k[0] == tenant and session_id in (None, k[1])]
    for key, entry in mine:
        state = entry.session.state
        if saved.is_overtaken(*key, state.changes):
            with lock:
                if entries.get(key) is entry and not entry.busy and entry.session.state is state:
                    del entries[key]


def trim(entries: Entries, most: int, most_bytes: int | None) -> dict[str, int]:
    """Evict the least recently used sessions that are not busy, down to both limits; how many for which."""
    counts = {"evicted_count": 0, "evicted_bytes": 0}
    size = sum(entry.bytes for entry in entries.values())
    for key in [key for key, entry in entries.items() if not entry.busy]:
        too_many = len(entries) > most
        if not too_many and (most_bytes is None or size <= most_bytes):
            break
        counts["evicted_count" if too_many else "evicted_bytes"] += 1
        size -= entries.pop(key).bytes
    return counts
