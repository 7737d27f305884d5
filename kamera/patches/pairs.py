"""Forms the terms of composed patches: a chunk's patches behind single chunks, ordered pairs and triples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kamera.errors import quote
from kamera.patches.chunks import Facts
from kamera.patches.composing import FORMED_TERM
from kamera.patches.line import Line

if TYPE_CHECKING:
    from kamera.patches.former import Former


Triples = Literal["standing", "all"]
"""Ordered triples of chunks: those in the order the chunks are named in, or those of every order."""


class Pairs(NamedTuple):
    """Terms that were ``formed`` now, and those that were ``stored`` before."""

    formed: int
    stored: int


def form_pairs(
    former: Former, targets: Sequence[Facts], chunks: Sequence[Facts], *, triples: Triples | None = None
) -> Pairs:
    """Form and store the terms of ``targets`` behind all orders of all subsets of ``chunks``.

    Of n other chunks a target has n singles and n(n − 1) ordered pairs; of ``triples`` n(n − 1)(n − 2), or a
    sixth of these that stand in the order of ``chunks``. Stored terms are skipped. One forward of a target
    for each, and one of a chunk behind others for what terms stand behind, which all targets share and which
    is that chunk's own term. ValueError for another ``triples``.
    """
    if triples not in (None, *get_args(Triples)):
        raise ValueError(f"triples {quote(triples)}: give 'standing', 'all' or None")
    named = {chunk.chunk_id: chunk for chunk in (*targets, *chunks)}
    antecedents = list(dict.fromkeys(chunk.chunk_id for chunk in chunks))
    wanted: dict[tuple[str, ...], list[str]] = {}
    stored = 0
    for target in {t.chunk_id: t for t in targets}.values():
        others = [name for name in antecedents if name != target.chunk_id]
        for behind in _terms(others, triples):
            if _stored(former, target, behind):
                stored += 1
            else:
                wanted.setdefault(behind, []).append(target.chunk_id)
    roads = {behind[:end] for behind in wanted for end in range(1, len(behind) + 1)}
    line = Line(former)

    def walk(behind: tuple[str, ...]) -> None:
        here = wanted.get(behind, [])
        deeper = [name for name in antecedents if (*behind, name) in roads]
        for name in dict.fromkeys((*here, *deeper)):
            line.stand([named[one] for one in behind])
            before = line.before
            copy = line.append(named[name])
            if name in here:
                former.keep_patch(named[name], copy, FORMED_TERM, before)
            if name in deeper:
                walk((*behind, name))

    walk(())
    return Pairs(sum(map(len, wanted.values())), stored)


def _terms(others: Sequence[str], triples: Triples | None) -> Iterator[tuple[str, ...]]:
    for size in (1, 2):
        yield from itertools.permutations(others, size)
    if triples is not None:
        yield from (itertools.permutations if triples == "all" else itertools.combinations)(others, 3)


def _stored(former: Former, target: Facts, behind: tuple[str, ...]) -> bool:
    row = former.catalogue.patch_within(target.chunk_id, target.length, behind, "exact", former.budget)
    return row is not None and row.formed == FORMED_TERM and not former.unproved(row)
