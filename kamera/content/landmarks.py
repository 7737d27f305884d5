"""Landmarks of a conversation that is given as token ids: the starts of turns, and the spans of media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kamera.content.borders import turn_borders
from kamera.content.template import ChatTemplate


class Landmarks(NamedTuple):
    """Positions of the tokens that open turns; ``[start, stop)`` of media, their wrappers included."""

    turns: tuple[int, ...]
    media: tuple[tuple[int, int], ...]

    @property
    def borders(self) -> tuple[int, ...]:
        """All of them as positions, in order."""
        return tuple(sorted({*self.turns, *(edge for span in self.media for edge in span)}))


class LandmarkReader:
    """Reads the landmarks of one processor's (or bare tokenizer's) chat template; threads may share one.

    The tokens that open a turn and wrap media are those that the template itself writes. A template that
    opens turns with words has no turns to be found. Raises ProcessorRequired without a chat template.
    """

    def __init__(self, processor: Any) -> None:
        template = ChatTemplate(processor)
        self._opener = template.opener
        kinds = {kind: template.ids(template.placeholder(kind)) for kind in template.kinds}
        self._media = {
            ids[0]: tuple(map(template.ids, template.wrapper(kind)))
            for kind, ids in kinds.items()
            if len(ids) == 1
        }

    def of(self, ids: Sequence[int]) -> Landmarks:
        """The landmarks of ``ids`` ``[tokens]``. Tokens between a media's wrappers are one span."""
        tokens = [int(i) for i in ids]
        media: list[tuple[int, int]] = []
        at = 0
        while at < len(tokens):
            wrapper = self._media.get(tokens[at])
            if wrapper is None:
                at += 1
                continue
            start, stop = _span(tokens, at, *wrapper)
            media.append((start, stop))
            at = max(stop, at + 1)
        inside = {i for start, stop in media for i in range(start + 1, stop)}
        turns = turn_borders(tokens, self._opener, 0, len(tokens))
        return Landmarks(tuple(t for t in turns if t not in inside), tuple(media))


def _span(ids: list[int], at: int, prefix: list[int], suffix: list[int]) -> tuple[int, int]:
    """The span of the picture or clip whose first placeholder is at ``at``."""
    start = at - len(prefix) if prefix and ids[max(0, at - len(prefix)) : at] == prefix else at
    stop = at
    while stop < len(ids) and ids[stop] == ids[at]:
        stop += 1
    if suffix and start < at:  # other tokens may stand between placeholders: rows, tiles, times of frames
        ends = (i for i in range(stop, len(ids)) if ids[i : i + len(suffix)] == suffix)
        stop = next(ends, stop - len(suffix)) + len(suffix)
    return start, stop
