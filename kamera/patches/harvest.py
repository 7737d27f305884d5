"""Which prefills leave a patch behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kamera.ops import Guarantee, PatchBudget, at_least, guarantee_named, outranks
from kamera.store import ObjectInfo, chunks_of


class Stored(NamedTuple):
    """A stored patch: the guarantee it was ``formed`` behind, and whether it can be served as it is.

    It cannot below the budget asked for, or if it has yet to prove itself.
    """

    formed: Guarantee
    serves: bool


def stored_patch(row: ObjectInfo | None, budget: PatchBudget, tokens: int, *, proving: bool) -> Stored | None:
    """What a row says of the patch of a chunk of ``tokens`` tokens; None without a row.

    Under ``budget``; with ``proving`` it serves only once it was asked enough.
    """
    if row is None:
        return None
    met = row.budget is not None and budget.met_by(row.budget, tokens)
    asked = row.proof is not None and not row.proof.undecided
    return Stored(guarantee_named(row.formed), met and (asked or not proving))


def worth_harvesting(
    held: Callable[[tuple[str, ...]], Stored | None],
    antecedents: tuple[str, ...],
    formed: Guarantee,
    leading: bool = False,
) -> bool:
    """True if the patch of a prefill behind ``antecedents`` is worth storing.

    Without antecedents it is only if ``leading``: it then corrects the conditioning on another anchor.
    ``held`` returns the stored patch for given antecedents (None: none is). A copy conditioned by near or
    blind KV carries their error and is not harvested, and a store keeps what was formed behind stronger KV.
    """
    if not (antecedents or leading) or not at_least(formed, "survivor"):
        return False
    there = held(antecedents)
    if there is not None and outranks(there.formed, formed):
        return False
    # a patch formed behind exactly these chunks serves survivors too, and better
    chunks = chunks_of(antecedents)
    best = there if chunks == antecedents else held(chunks)
    return not any(patch and patch.serves and at_least(patch.formed, formed) for patch in (there, best))
