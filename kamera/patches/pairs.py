"""Forms the terms of composed patches: a chunk's patches behind single chunks and behind ordered pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kamera.patches.chunks import Facts
from kamera.patches.composing import FORMED_TERM
from kamera.patches.line import Line

if TYPE_CHECKING:
    from kamera.patches.former import Former


class Pairs(NamedTuple):
    """Terms that were ``formed`` now, and those that were ``stored`` before."""

    formed: int
    stored: int


def form_pairs(former: Former, targets: Sequence[Facts], chunks: Sequence[Facts]) -> Pairs:
    """Form and store the terms of ``targets`` behind all orders of all subsets of ``chunks``.

    Of n other chunks a target has n singles and n(n − 1) ordered pairs; stored ones are skipped. One forward
    of a target for each, and one of a chunk behind another for each pair of chunks, which all targets share
    and which is that chunk's own single.
    """
    named = {chunk.chunk_id: chunk for chunk in (*targets, *chunks)}
    antecedents = list(dict.fromkeys(chunk.chunk_id for chunk in chunks))
    wanted: dict[tuple[str, ...], list[Facts]] = {}
    stored = 0
    for target in {t.chunk_id: t for t in targets}.values():
        others = [name for name in antecedents if name != target.chunk_id]
        for behind in itertools.chain(*(itertools.permutations(others, n) for n in (1, 2))):
            row = former.catalogue.patch_within(
                target.chunk_id, target.length, behind, "exact", former.budget
            )
            if row is not None and row.formed == FORMED_TERM and not former.unproved(row):
                stored += 1
            else:
                wanted.setdefault(behind, []).append(target)
    line = Line(former)
    for first in antecedents:
        seconds = [t.chunk_id for t in wanted.get((first,), ())]
        seconds += [second for second in antecedents if (first, second) in wanted]
        for second in dict.fromkeys(seconds):
            line.stand([named[first]])
            before = line.before
            copy = line.append(named[second])
            if named[second] in wanted.get((first,), ()):
                former.keep_patch(named[second], copy, FORMED_TERM, before)
            for target in wanted.get((first, second), ()):
                former.keep_patch(target, line.prefill(target), FORMED_TERM, line.before)
    return Pairs(sum(map(len, wanted.values())), stored)
