"""Offers of composed patches, decided from rows: are all the terms of an order stored?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kamera.ops import terms_of, triples_of
from kamera.patches import FORMED_TERM, Guarantee, composable
from kamera.window.seats import Seat
from kamera.window.steps import Offer


class TermRows(NamedTuple):
    """What is known of a chunk's patches behind given antecedents, without their tensors.

    ``formed`` is the guarantee of the KV that one was formed behind (None: none is stored), ``size`` its
    bytes.
    """

    formed: Callable[[tuple[str, ...]], Guarantee | None]
    size: Callable[[tuple[str, ...]], int]

    def make(self, antecedents: Sequence[str]) -> bool:
        """True if all terms of these antecedents are stored."""
        return composable(antecedents) and all(map(self.has, terms_of(antecedents)))

    def has(self, behind: Sequence[str]) -> bool:
        """True if this term is stored."""
        return self.formed(tuple(behind)) == FORMED_TERM


def composed_offer(
    antecedents: tuple[str, ...], was: Seat | None, rows: TermRows, max_doubt: float
) -> Offer | None:
    """The offer of a patch composed for ``antecedents``; None if a term is missing.

    ``was`` is the chunk's present seat: where antecedents have left it and the others stand as they stood,
    the patch behind those there is made use of, if it is stored together with its terms. After a reorder, and
    beside all triples, it costs more than it gains (docs/composed.md).
    """
    if not rows.make(antecedents):
        return None
    wanted = triples_of(antecedents)
    triples = tuple(filter(rows.has, wanted))
    old = () if was is None or (wanted and len(triples) == len(wanted)) else was.source.antecedents
    known = old if departed(old, antecedents) and rows.make(old) and rows.has(old) else ()
    largest = max(map(rows.size, terms_of(antecedents)))
    return Offer(
        "composed",
        antecedents,
        "composed",
        FORMED_TERM,
        largest,
        known=known,
        triples=triples,
        max_doubt=max_doubt,
    )


def departed(old: Sequence[str], now: Sequence[str]) -> bool:
    """True if ``now`` is what stays of ``old``, in its order, after at least one has left."""
    rest = iter(old)
    return len(now) < len(old) and all(name in rest for name in now)
