"""The sessions of a pool in memory, the last used one at the end."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kamera.sessions.chat import ChatSession
from kamera.sessions.match import Candidate, candidate


@dataclass(eq=False)
class Entry:
    """A session, a flag that a request is writing it, and the tails that its last answer alone has.

    ``named``: its client gave the id, and is known by it, not by tails.
    """

    session: ChatSession
    busy: bool = False
    bytes: int = 0
    tails: frozenset[str] = frozenset()
    named: bool = False


Entries = OrderedDict[tuple[str, str], Entry]
"""By tenant and id."""


def candidates(entries: Entries, tenant: str, kind: str) -> dict[str, Candidate]:
    """Sessions that a prompt with tools of ``kind`` may go to, the last used first."""
    found: dict[str, Candidate] = {}
    for (whose, name), entry in reversed(entries.items()):
        if whose == tenant and entry.session.manner.kind == kind:
            held = candidate(entry.session, frozenset() if entry.named else entry.tails)
            found |= {} if held is None else {name: held}
    return found


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
