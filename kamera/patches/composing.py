"""Serves patches composed of stored terms: no forward, nothing stored (`kamera.ops.compose`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kamera.ops import Guarantee, Patch, compose, kv_of, terms_of
from kamera.patches.chunks import Facts

if TYPE_CHECKING:
    from kamera.patches.former import Former

FORMED_TERM: Guarantee = "exact"
"""Terms are patches that were formed behind exact antecedents: an error in one would be composed on."""

COMPOSABLE = range(3, 7)
"""Numbers of antecedents behind which a patch is composed.

Behind fewer, the term itself is the patch; more were not measured (docs/composed.md).
"""


def composable(antecedents: Sequence[str]) -> bool:
    """True if a patch behind these antecedents may be composed: three to six, and none of them twice."""
    return len(set(antecedents)) == len(antecedents) and len(antecedents) in COMPOSABLE


def composed(
    former: Former,
    facts: Facts,
    antecedents: Sequence[str],
    *,
    known: Sequence[str] = (),
    triples: Sequence[Sequence[str]] = (),
    max_doubt: float,
) -> Patch | None:
    """The patch of a chunk behind ``antecedents``, within the former's budget, as rows of its terms promised.

    ``known`` are other antecedents (or none) whose own patch is stored, and its terms. ``triples`` are the
    stored triples of ``antecedents``. None if a term was missing or differed from its row, or if doubt is
    above ``max_doubt``: that is refused then, and noted.
    """
    orders = [antecedents, known] if known else [antecedents]
    terms: dict[tuple[str, ...], Patch] = {}
    wanted = [*(term for order in orders for term in terms_of(order)), *map(tuple, triples), tuple(known)]
    for behind in dict.fromkeys(wanted):
        if behind:
            found = former.patch(facts, behind, "exact", FORMED_TERM)
            if found is None:
                return None
            terms[behind] = found.truncate(former.budget.rank)
    made = compose(terms, antecedents, (known, terms[tuple(known)]) if known else None)
    if made.doubt > max_doubt:
        former.losses.note(
            f"composed patch refused: the terms of chunk {facts.chunk_id[:12]} behind these "
            f"{len(antecedents)} contradict each other, doubt {made.doubt:.2f} above {max_doubt:.2f}"
        )
        former.catalogue.doubt(facts.chunk_id, antecedents)
        return None
    layout = former.backbone.layout
    deltas = [
        {c.name: layer.get(c.name, torch.zeros(facts.length, c.features)) for c in spec.channels}
        for layer, spec in zip(made.deltas, layout, strict=True)
    ]
    canonical = former.canonical(facts).kv
    return former.budget.form(kv_of(deltas, canonical.groups), layout, canonical).formed.patch
