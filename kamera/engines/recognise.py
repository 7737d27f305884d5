"""Stored chunks in a prompt, by token ids and the engine's names of its pictures: rows alone, no tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from kamera.content import EXPONENT, LONGEST, SHORTEST, candidates, text_borders
from kamera.engines.recipe import COMPUTED, Part, Recipe
from kamera.ops import chunk_id, ids_digest
from kamera.store import OPENING, Context, ObjectInfo, computed_base
from kamera.trust import Guarantee

_Name = tuple[str, tuple[str, ...]]
"""The digest of a chunk's token ids, and ids of its pictures."""


class Placeholder(NamedTuple):
    """A picture in a prompt: its run of placeholder tokens, and the id by which the engine knows it."""

    start: int
    length: int
    id: str


class StoredSpan(NamedTuple):
    """A stored chunk in a prompt: tokens ``start`` up to ``stop``."""

    row: ObjectInfo
    start: int
    stop: int


class Recognised:
    """The chunks whose KV is stored under one context, by their token ids and media.

    An alias (media id of an engine, or a chunk's own id as ``multi_modal_uuids``) leads to a chunk of the
    same tenant, model, anchor and form alone, and only where the prompt has the chunk's token ids. It is
    made of rows, and can be made again at any time. Not safe for several threads.
    """

    def __init__(self, context: Context, rows: Iterable[ObjectInfo] = ()) -> None:
        self.context = context
        self._rows: dict[_Name, ObjectInfo] = {}
        # lengths of chunks, by the opening of a text, or by the first picture
        self._lengths: dict[tuple[int, ...] | str, set[int]] = defaultdict(set)
        self._openings = set[int]()  # their lengths: a short text is no longer than its opening
        for row in rows:
            self.add(row)

    def add(self, row: ObjectInfo) -> bool:
        """Know the chunk of a canonical, or of what an engine computed; False for any other row."""
        is_whole = row.kind == "canonical" or computed_guarantee(row) is not None
        if not is_whole or row.context != self.context or row.outline is None or not row.tokens:
            return False
        for name in _names(row):
            if self._rows.setdefault(name, row) is row:
                opening = row.outline.opening
                self._lengths[name[1][0] if name[1] else opening].add(row.tokens)
                self._openings.add(len(opening))
        return True

    def longest(
        self, ids: np.ndarray, at: int, media: Sequence[Placeholder], index: int
    ) -> ObjectInfo | None:
        """The longest chunk that begins at token ``at``; ``media[index]`` is the next picture."""
        beginning = tuple(ids[at : at + OPENING].tolist())
        begins: list[tuple[int, ...] | str] = [beginning[:length] for length in self._openings]
        begins += [picture.id for picture in media[index : index + 1]]
        lengths = {length for begin in begins for length in self._lengths.get(begin, ())}
        for length in sorted(lengths, reverse=True):
            stop, last = at + length, index
            while last < len(media) and media[last].start < stop:
                last += 1
            if stop > len(ids) or (last > index and sum(media[last - 1][:2]) > stop):
                continue
            pictures = tuple([m.id for m in media[index:last]])
            own = tuple(dict.fromkeys(pictures))  # several may all bear their chunk's id
            digest = ids_digest(ids[at:stop])
            row = self._rows.get((digest, pictures)) or self._rows.get((digest, own))
            if row is not None:
                return row
        return None


def match(
    ids: Sequence[int] | np.ndarray, media: Sequence[Placeholder], known: Recognised, start: int
) -> tuple[StoredSpan, ...]:
    """The stored chunks that follow each other in a prompt from its token ``start`` on.

    ``ids`` are those of the rendered prompt, placeholder runs expanded, ``media`` its pictures in order.
    It ends where no stored chunk begins.
    """
    whole = np.ascontiguousarray(ids, dtype="<i8")
    spans: list[StoredSpan] = []
    at, index = start, bisect_left(media, start, key=attrgetter("start"))
    while at < len(whole) and (row := known.longest(whole, at, media, index)) is not None:
        spans.append(StoredSpan(row, at, at + row.tokens))
        at += row.tokens
        index = bisect_left(media, at, index, key=attrgetter("start"))
    return tuple(spans)


def computed_guarantee(row: ObjectInfo) -> Guarantee | None:
    """What KV is worth that an engine computed behind its antecedents; None for any other row."""
    if row.kind != "conditioned":
        return None
    return next((guarantee for guarantee in COMPUTED if row.base == computed_base(guarantee)), None)


def with_rest(recipe: Recipe, ids: np.ndarray, opener: int | None, stop: int, axes: int) -> Recipe:
    """A recipe of a prompt's beginning, and behind it the turns up to token ``stop``, to be computed.

    The last turn, which the template has opened for the answer, is no chunk. Turns begin with the ``opener``;
    one that is long is cut where its content says, as in a rendered conversation.
    """
    start = recipe.borders[-1]
    turns = [] if opener is None else (start + np.flatnonzero(ids[start:] == opener)).tolist()
    turns = [turn for turn in turns if turn <= stop]
    cuts = candidates(np.asarray(ids, np.uint32), EXPONENT, "high").tolist()
    borders = sorted({start, *turns})
    if not turns:  # there are no turns: the last cut ends what is known to come again
        borders = [start, *(cut for cut in cuts[-1:] if start < cut <= stop)]
    parts = list(recipe.parts)
    for low, high in pairwise(borders):
        inner = text_borders(cuts, low, high, shortest=SHORTEST, longest=LONGEST)
        for one, two in pairwise([low, *inner, high]):
            tokens = tuple(ids[one:two].tolist())
            name = chunk_id(torch.tensor(tokens, dtype=torch.int64), {})
            place = (one,) * axes
            parts.append(Part(name, tokens, one, place, (0,) * axes, "exact", (), missing="it is computed"))
    return replace(recipe, parts=tuple(parts))


def _names(row: ObjectInfo) -> list[_Name]:
    """The keys of a chunk: token ids, with its media's aliases, and with its own id for them."""
    if row.outline is None:
        return []
    ids, media = row.outline.ids, row.outline.media
    if not (media or (row.base and row.kind == "canonical")):
        return [(ids, ())]
    return [(ids, (row.chunk_id,)), *([(ids, media)] if media else [])]
