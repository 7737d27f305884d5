"""Spans of messages that leave by themselves: Leyline's decay, a directive whose time has yet to come.

In a session such a directive counts from its beginning: ``turns`` is the number of the first turn that does
not see the span any more, ``seconds`` a time since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from kamera.content import Message
from kamera.edits.directive import Directive
from kamera.edits.policy import same

GONE = 0
"""Turns of a span that has left."""


def begin_decay(directive: Directive, turn: int, now: float) -> Directive:
    """A directive that was given when ``turn`` turns had been answered, at the time ``now``."""
    turns, seconds = directive.turns, directive.seconds
    return replace(
        directive,
        turns=None if turns is None else max(turn, 1) + turns,
        seconds=None if seconds is None else now + seconds,
    )


def due(decays: Sequence[Directive], turn: int, now: float) -> list[Directive]:
    """Those whose spans turn number ``turn`` does not see."""
    return [
        d
        for d in decays
        if (d.turns is not None and turn >= d.turns) or (d.seconds is not None and now >= d.seconds)
    ]


def settled(decays: Sequence[Directive], left: Sequence[Directive]) -> tuple[Directive, ...]:
    """The directives, of which those in ``left`` have taken place."""
    return tuple([replace(d, turns=GONE, seconds=None) if d in left else d for d in decays])


def followed(
    decays: Sequence[Directive], old_history: Sequence[Message], history: Sequence[Message]
) -> tuple[Directive, ...]:
    """Directives on the messages of a history, on the same messages of one that it has become.

    One whose messages do not all stand there, one behind the other, ends.
    """
    end = max((d.end for d in decays), default=0)
    if same(old_history[:end], history[:end]):
        return tuple(decays)
    old, new = ([_key(message) for message in messages] for messages in (old_history, history))
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    places = {block.a + i: block.b + i for block in blocks for i in range(block.size)}
    moved = [(d, places.get(d.start, -1)) for d in decays]
    return tuple(
        [
            replace(d, start=at, end=at + d.end - d.start)
            for d, at in moved
            if all(places.get(i) == at + i - d.start for i in range(d.start, d.end))
        ]
    )


def renewed(decays: Sequence[Directive], touched: Sequence[Directive]) -> tuple[Directive, ...]:
    """Those directives whose spans none of the ``touched`` ones meets, which hold in their place."""
    return tuple([d for d in decays if not any(d.start < t.end and t.start < d.end for t in touched)])


def _key(value: Any) -> Any:
    """A value that is equal for equal messages, and can be looked up."""
    if isinstance(value, dict):
        return tuple([(name, _key(value[name])) for name in sorted(value)])
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else value
