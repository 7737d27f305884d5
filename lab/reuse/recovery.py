"""Observer mode: counts the tokens of each request that occurred before, and reuses none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kamera.reuse.index import ContentIndex, Hit
from kamera.reuse.prompt import Prompt

SINK = 32
"""Tokens at the start of a prompt that are always prefilled: attention sinks (Irminsul, 7.1)."""


@dataclass(frozen=True)
class Recovery:
    """Token counts of requests: in an exact prefix of an earlier request, recovered after it, and all.

    ``recovered`` tokens occurred before in an equal segment at any position. They are an upper bound on the
    savings of reuse: their KV may depend on other antecedents.
    """

    requests: int = 0
    tokens: int = 0
    prefix: int = 0
    recovered: int = 0

    @property
    def novel(self) -> int:
        """Tokens neither in the prefix nor recovered."""
        return self.tokens - self.prefix - self.recovered

    def __add__(self, other: Recovery) -> Recovery:
        return Recovery(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.prefix + other.prefix,
            self.recovered + other.recovered,
        )


class Observer:
    """Counts each request against all before it, and adds it to the index."""

    def __init__(self, index: ContentIndex, *, sink: int = SINK) -> None:
        """The first ``sink`` tokens count as novel outside a prefix. `ValueError` below 0."""
        if sink < 0:
            raise ValueError(f"sink {sink} must be 0 or more tokens")
        self._index = index
        self._sink = sink

    def observe(self, prompt: Prompt) -> Recovery:
        """Counts of ``prompt`` against the index, to which it is then added."""
        found = self._index.find(prompt)
        self._index.add(prompt, found.cuts)
        return Recovery(1, len(prompt), found.prefix, covered(found.hits, max(found.prefix, self._sink)))


def recovery(index: ContentIndex, prompts: Iterable[Prompt], *, sink: int = SINK) -> Recovery:
    """The sum over ``prompts``, in their order."""
    observer = Observer(index, sink=sink)
    return sum((observer.observe(prompt) for prompt in prompts), Recovery())


def covered(hits: Sequence[Hit], first: int) -> int:
    """Tokens at ``first`` or later that are in any of ``hits``."""
    count = 0
    at = first
    for start, stop, *_ in sorted(hits):
        count += max(0, stop - max(start, at))
        at = max(at, stop)
    return count
