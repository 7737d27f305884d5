"""Content-defined cuts of a prompt: the borders of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kamera.content import Ids, Places, candidates, text_borders
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import CutRule


def cut_prompt(
    prompt: Prompt, rule: CutRule, kept: Sequence[tuple[int, int]] = (), edges: Sequence[int] = ()
) -> list[int]:
    """The boundaries of ``prompt``'s segments in order, 0 and its length among them.

    Segment i is tokens ``cuts[i]`` to ``cuts[i + 1]``; together they are the prompt. The end of a segment
    depends on its own tokens and the resets alone. An empty prompt has the one boundary 0. ``edges`` are
    further resets; spans that are ``kept``, apart and none across a reset, are segments as they are.
    """
    whole = {*(m.start for m in prompt.media), *(start for start, _ in kept)}
    resets = sorted({*fixed_cuts(prompt, rule), *edges, *(edge for span in kept for edge in span)})
    places = candidates(prompt.ids, rule.exponent, rule.bits).tolist() if rule.kind == "content" else []
    cuts = [0]
    for start, stop in pairwise(resets):
        if start not in whole:  # a picture, or a segment that came before
            cuts += text_borders(places, start, stop, shortest=rule.minimum, longest=rule.maximum)
        cuts.append(stop)
    return cuts


def fixed_cuts(prompt: Prompt, rule: CutRule) -> list[int]:
    """The boundaries independent of content, in order: both ends, media, and the rule's resets."""
    total = len(prompt)
    places = {0, total}
    if rule.anchors:
        places.update(prompt.anchors)
    if rule.spans:
        places.update(edge for span in prompt.spans for edge in (span.start, span.stop))
    if rule.marker:
        for start in occurrences(prompt.ids, rule.marker).tolist():
            places.update((start, start + len(rule.marker)))
    for one in prompt.media:  # no rule cuts a picture
        places.difference_update(range(one.start + 1, one.stop))
        places.update((one.start, one.stop))
    return sorted(places)


def occurrences(ids: Ids, marker: tuple[int, ...]) -> Places:
    """Starts of ``marker`` in ``ids``; of two that overlap, both."""
    room = len(ids) - len(marker) + 1
    if room < 1:
        return np.zeros(0, np.int64)
    places = np.flatnonzero(ids[:room] == marker[0])
    for offset, token in enumerate(marker[1:], start=1):
        places = places[ids[places + offset] == token]
    return places
