"""Directives: a span of a prompt, what is done to it, and the KV of the chunks after it.

After the directive of Leyline (section 3.1) and its other verbs (appendix J), extended by units, by `repair`
and by indivisible spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Literal, get_args

from kamera.content import Rendered
from kamera.errors import InvalidDirective, quote

Mode = Literal["amortize", "repair", "forget", "auto"]
"""What becomes of the chunks behind an edited span (docs/sessions.md)."""
Unit = Literal["tokens", "messages", "segments"]
"""What a span is counted in."""
Verb = Literal["edit", "evict", "decay", "share", "pin"]
"""What is done to a span."""
EDITS: tuple[Verb, ...] = ("edit", "evict")
"""Those that change the prompt at once."""
Snap = Literal["refuse", "widen"]
"""What happens to a span that would cut a tag or a picture."""


@dataclass(frozen=True)
class Directive:
    """Replace ``start:end`` of a prompt, counted in ``unit``, by ``replacement``.

    ``replacement`` is text, token ids, or None for nothing. ``mode`` determines the KV of the chunks after
    the span:

    * ``amortize``: relocated, still conditioned on the span. The model does not forget it.
    * ``repair``: relocated and patched to the antecedents without the span.
    * ``forget``: prefilled again; equal to a run that never saw the span.
    * ``auto``: the cheapest of these that the window's policy admits.

    Other verbs than ``edit``: ``evict`` is an edit without a replacement; ``decay`` edits whole messages
    later, once ``turns`` more turns have seen them, or so many ``seconds`` have passed; ``share`` stores the
    span's KV now, for other sessions on the store; ``pin`` also keeps it there, for ``seconds`` (None: until
    it is unpinned).

    Raises InvalidDirective for an unknown mode, unit or verb, what its verb does not take, or a span that
    ends before it starts.
    """

    start: int
    end: int
    replacement: str | Sequence[int] | None = None
    mode: Mode = "repair"
    unit: Unit = "tokens"
    verb: Verb = "edit"
    turns: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, known in (("mode", Mode), ("unit", Unit), ("verb", Verb)):
            if getattr(self, name) not in get_args(known):
                word = quote(getattr(self, name))
                raise InvalidDirective(f"{name} {word} is none of {', '.join(get_args(known))}")
        self._check_verb()
        for name, value in (("start", self.start), ("end", self.end)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidDirective(f"{name} {quote(value)} is not an index: give a whole number")
        if not 0 <= self.start <= self.end:
            raise InvalidDirective(f"span {self.start}:{self.end} is invalid: give 0 <= start <= end")

    def _check_verb(self) -> None:
        verb = self.verb
        takes = {"edit": ["replacement"], "decay": ["replacement", "turns", "seconds"], "pin": ["seconds"]}
        for name in ("replacement", "turns", "seconds"):
            if getattr(self, name) is not None and name not in takes.get(verb, ()):
                raise InvalidDirective(
                    f"{name} {quote(getattr(self, name))}: {verb} takes none, leave it out"
                )
        if verb == "decay":
            if self.unit != "messages" or not isinstance(self.replacement, str | None):
                raise InvalidDirective(
                    'decay is of whole messages, for text or nothing: give unit="messages"'
                )
            if self.turns is None and self.seconds is None:
                raise InvalidDirective("decay has no end: give turns, seconds or both")
        for name, value, kind in (("turns", self.turns, int), ("seconds", self.seconds, int | float)):
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < math.inf):
                raise InvalidDirective(f"{name} {quote(value)} is no number from 0 on")


@dataclass(frozen=True)
class Edit:
    """A directive in the tokens of one rendered prompt: ``start:stop`` becomes ``replacement``."""

    start: int
    stop: int
    replacement: tuple[int, ...]
    directive: Directive


def resolve(
    directives: Sequence[Directive],
    rendered: Rendered,
    tokenize: Callable[[str], Sequence[int]],
    *,
    snap: Snap = "refuse",
) -> tuple[Edit, ...]:
    """Directives as edits of ``rendered``, in order, without overlaps.

    A span that would cut a template tag or a picture raises InvalidDirective; with ``snap="widen"`` it grows
    to the whole turn or picture. Also raises InvalidDirective for spans outside the prompt and for spans that
    overlap.
    """
    if snap not in get_args(Snap):
        raise ValueError(f"snap {quote(snap)} is none of {', '.join(get_args(Snap))}")
    edits = []
    for directive in directives:
        start, stop = _token_span(directive, rendered)
        if stop > rendered.stable:
            raise InvalidDirective(
                f"span {directive.start}:{directive.end} ({directive.unit}) ends after the prompt's "
                f"{rendered.stable} tokens: end it there"
            )
        given = directive.replacement
        new = tuple(tokenize(given) if isinstance(given, str) else given or ())
        if any(not isinstance(i, int) or i < 0 for i in new):
            raise InvalidDirective(f"replacement {quote(given)} holds a value that is not a token id")
        grown = _snap_outwards(rendered, start, stop)
        if grown != (start, stop) and snap == "refuse":
            raise InvalidDirective(
                f"tokens {start}:{stop} cut a picture or a template tag: give {grown[0]}:{grown[1]}, or "
                'snap="widen"'
            )
        edits.append(Edit(*grown, new, directive))
    edits.sort(key=attrgetter("start", "stop"))
    for one, other in pairwise(edits):
        if other.start < one.stop or one.start == other.start:
            raise InvalidDirective(
                f"directives on tokens {one.start}:{one.stop} and {other.start}:{other.stop} overlap: merge "
                "them into one"
            )
    return tuple(edits)


def _token_span(directive: Directive, rendered: Rendered) -> tuple[int, int]:
    first, last = directive.start, directive.end
    if directive.unit == "tokens":
        return first, last
    segments = rendered.segments
    if directive.unit == "messages":
        count = max((s.messages[1] for s in segments), default=0)
        if last > count:
            raise InvalidDirective(f"messages {first}:{last} of a conversation of {count}: end at {count}")
        if first < last:
            try:
                first, last = rendered.of_messages(first, last)
            except ValueError as error:
                raise InvalidDirective(str(error)) from None
        else:
            first = last = next((i for i, s in enumerate(segments) if s.messages[1] > first), len(segments))
    elif last > len(segments):
        raise InvalidDirective(f"segments {first}:{last} of a prompt of {len(segments)}: end at its last one")
    borders = [s.start for s in segments] + [rendered.stable]
    return borders[first], borders[last]


def _snap_outwards(rendered: Rendered, start: int, stop: int) -> tuple[int, int]:
    """The smallest span around ``start:stop`` that cuts no picture and no tag of a turn."""
    before = (-1, -1)
    while before != (start, stop):
        before = (start, stop)
        for first, last in [(s.start, s.stop) for s in rendered.segments if s.media is not None]:
            if first < start < last or first < stop < last:
                start, stop = min(start, first), max(stop, last)
        for tag in rendered.tags:
            touched = start < tag[1] and tag[0] < stop if start < stop else tag[0] < start < tag[1]
            if touched:
                turn = next((t for t in rendered.turns if t[0] <= tag[0] < t[1]), tag)
                start, stop = min(start, turn[0]), max(stop, turn[1])
    return start, stop
