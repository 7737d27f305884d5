"""Counts of a pool's requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kamera.sessions.turn import Turn, TurnReport


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
    by theirs. ``anchors``: system prompts prefilled. ``dropped``: pieces of the backbone's later work that
    were dropped over its bytes. ``anticipated``: turns that began with what was prepared for them;
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
    line = f"session {name} {how}: {cached} of {prompt} tokens at hand ({', '.join(served)})"
    return line + "".join(f"; {tokens} prefilled: {reason}" for reason, tokens in missed.most_common())
