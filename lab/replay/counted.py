"""What caches do that are counted on the tokens alone: none, a prefix cache, and Kronk's two.

Kronk's are as its version 1.31.9 has them. SPC keeps the system prompt. SPC + IMC also keeps the session: an
equal or extended prompt goes on, a changed text starts again behind the system prompt, and any change of
pictures or clips, even one that is appended, starts again too (there from nothing; counted here in its favour
as behind the system prompt). Neither keeps fewer than 100 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kamera.content import Rendered
from kamera.edits import difference
from kamera.sessions.layout import anchor_ids, count_anchor_segments

MIN_TOKENS = 100
"""Kronk's ``cache-min-tokens``."""


@dataclass
class Cost:
    """Sums over a session.

    ``prefilled``: tokens run through the decoder for prompts. ``rewritten``: of these, tokens of the prompt
    before that stood behind an edit. ``rewrites``: turns that rewrote any. ``encodes``: vision tower runs.
    ``forwards``: decoder forwards for prompts. ``agreement`` and ``kl`` (nats, mean): of the next token with
    an uncached run.
    """

    prefilled: int = 0
    rewritten: int = 0
    rewrites: int = 0
    encodes: int = 0
    forwards: int = 0
    agreement: float = 1.0
    kl: float = 0.0

    def add(self, prefilled: int, rewritten: int, encodes: int, forwards: int) -> None:
        """One turn more."""
        self.prefilled += prefilled
        self.rewritten += rewritten
        self.rewrites += rewritten > 0
        self.encodes += encodes
        self.forwards += forwards


Reuse = Callable[[Rendered | None, Rendered], int]
"""Segments at the beginning of a prompt that are not prefilled again, given the prompt before."""


def nothing(before: Rendered | None, prompt: Rendered) -> int:
    """No cache."""
    return 0


def prefix(before: Rendered | None, prompt: Rendered) -> int:
    """A cache of the prompt before: what both begin with."""
    same = 0
    for old, new in zip(() if before is None else before.segments, prompt.segments, strict=False):
        if old.id != new.id:
            break
        same += 1
    return same


def spc(before: Rendered | None, prompt: Rendered) -> int:
    """Kronk's system prompt cache."""
    if before is None or anchor_ids(before) != anchor_ids(prompt):
        return 0
    first = count_anchor_segments(prompt)
    return first if first and prompt.segments[first - 1].stop >= MIN_TOKENS else 0


def imc(before: Rendered | None, prompt: Rendered) -> int:
    """Kronk's incremental message cache over its system prompt cache."""
    if before is None:
        return 0
    same = prefix(before, prompt)
    grew = same == len(before.segments) and _media(before) == _media(prompt)
    return same if grew and before.stable >= MIN_TOKENS else spc(before, prompt)


def counted(prompts: Sequence[Rendered], reuse: Reuse) -> Cost:
    """The cost of a session. The answer's own KV is reused by none, nor by Kamera."""
    cost = Cost()
    before: Rendered | None = None
    for prompt in prompts:
        same = reuse(before, prompt)
        shared = prompt.segments[same - 1].stop if same else 0
        change = None if before is None else difference(before, prompt)
        stayed = () if change is None or reuse is nothing else (*change.kept, *change.moved)
        behind = sum(prompt.segments[j].num_tokens for _, j in stayed if j >= same)
        encodes = sum(s.media is not None for s in prompt.segments[same:])
        cost.add(prompt.num_tokens - shared, behind, encodes, 1)
        before = prompt
    return cost


def _media(prompt: Rendered) -> list[str]:
    return [s.media for s in prompt.segments if s.media is not None]
