"""Orbit patches: one for a set of antecedents, the mean of what a chunk absorbs over their orderings."""

from __future__ import annotations

from collections.abc import Sequence

from kamera.ops import Formed, mean_deficit
from kamera.patches.chunks import Facts
from kamera.patches.former import Former
from kamera.patches.orderings import deficits, orderings
from kamera.store import PatchRecord


def form_orbit(
    former: Former, target: Facts, antecedents: Sequence[Facts], *, samples: int | None = None, seed: int = 0
) -> Formed:
    """Form the orbit patch of ``target`` behind the set ``antecedents`` and store it.

    ``samples`` and ``seed`` as in `orderings`. Runs one conditioned forward of the target per ordering,
    and one of an antecedent for each new prefix of an ordering; the first antecedent of an ordering is
    its canonical. Returns the patch and the share of the mean deficit's energy it keeps.
    """
    if not antecedents:
        raise ValueError("a leading chunk absorbs nothing: it needs no orbit patch")
    perms = orderings(len(antecedents), samples, seed)
    canonical = former.canonical(target)
    mean = mean_deficit(deficits(former, target, canonical, antecedents, perms))
    formed, filled = former.budget.form(mean, former.backbone.layout, canonical.kv)
    record = PatchRecord(
        chunk_id=target.chunk_id,
        context=former.context,
        antecedents=tuple(a.chunk_id for a in antecedents),
        kind="orbit",
        patch=formed.patch,
        formed="exact",
        info={"energy": formed.energy, **filled.to_info(), "orderings": len(perms)},
    )
    former.store.put(record)
    former.catalogue.forget(record.key)
    return formed
