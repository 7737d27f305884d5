"""Patches made of the difference of two copies of a chunk's KV, and handed to the store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

from kamera.errors import NotRelocatable
from kamera.ops import Deltas, PatchBudget, Sized, deficit, kv_tensors, patch_error, uniform_offset
from kamera.patches.catalogue import possible_names, stored_patch, worth_harvesting
from kamera.patches.chunks import Before, Copy, Facts
from kamera.patches.former import Former
from kamera.patches.later import Worth
from kamera.patches.owed import Owed, put_owed
from kamera.store import PatchRecord, patch_key


def harvest(former: Former, facts: Facts, conditioned: Copy, before: Before) -> None:
    """Store the patch that takes the canonical to ``conditioned``, unless a better one is there.

    ``before`` is what that was prefilled behind.
    """
    rows = (former.catalogue.patch(facts.chunk_id, names, "exact") for names in possible_names(before.names))
    stored = (stored_patch(row, former.budget, facts.length, former.max_error) for row in rows)
    if worth_harvesting(stored, before.names, before.formed):
        keep_patch(former, facts, conditioned, before)


def keep_patch(
    former: Former,
    facts: Facts,
    copy: Copy,
    before: Before,
    base: str = "",
) -> bool:
    """Form the patch that takes the canonical to ``copy``, and store it.

    ``before`` is what that was prefilled behind, ``base`` as in `PatchRecord`. False if the
    base's row was wrong, which is then refused.
    """
    canonical = former.base_copy(facts, base) if base else former.canonical(facts)
    if canonical is None:
        return False
    if facts.chunk_id in former.losses.unkept:
        return True  # its patch would have nothing to be served with
    deltas, form = _to_form(former, facts, canonical, copy, before, base)
    if former.queue is None or former.queue.is_own_thread:
        put_owed(form())
    else:
        held = [*chain(*map(kv_tensors, (copy.kv, canonical.kv, deltas))), *before.tensors]
        dropped, name = partial(patch_dropped, former, facts), (former.context, facts.chunk_id)
        former.store.awaited[id(former.queue)] = former.queue.flush
        former.queue.add(form, Worth.PATCH, held, dropped, name, reads=())
    former.catalogue.forget(patch_key(former.context, facts.chunk_id, before.names, "exact", base))
    return True


def patch_to_put(former: Former, facts: Facts, copy: Copy, before: Before, base: str) -> list[Owed]:
    """Form a patch as `keep_patch` does. Return its record, and that of a new canonical, to be put later."""
    canonical, owed = (former.base_copy(facts, base), []) if base else former.canonical_and_owed(facts)
    if canonical is None or facts.chunk_id in former.losses.unkept:
        return owed
    try:
        return [*owed, *_to_form(former, facts, canonical, copy, before, base)[1]()]
    except BaseException:
        put_owed(owed)
        raise


def patch_dropped(former: Former, facts: Facts, why: str) -> None:
    """Leave a note that a patch of a chunk was not formed."""
    former.losses.note_for_next(f"a patch of chunk {facts.chunk_id[:12]} was not formed: {why}")


def _to_form(
    former: Former,
    facts: Facts,
    canonical: Copy,
    conditioned: Copy,
    before: Before,
    base: str,
) -> tuple[Deltas, Callable[[], list[Owed]]]:
    """What takes a canonical to ``conditioned``, and the work that factors it to a patch.

    Arguments as of `keep_patch`. Raises NotRelocatable if its positions are not uniformly offset.
    """
    layout = former.backbone.layout
    offset = uniform_offset(canonical.positions, conditioned.positions)
    if offset is None:
        raise NotRelocatable(
            f"chunk {facts.chunk_id[:12]} does not move as a whole: its tokens shift against each "
            "other at the new place (a clip cut out of a longer one?); append it anew"
        )
    deltas = deficit(conditioned.kv, canonical.kv, layout, offset)

    def form() -> list[Owed]:
        ((patch, energy), filled), error = form_within(former, deltas, canonical)
        info = {"energy": energy, "error": error, **filled.to_info()}
        made = (former.context, before.names, "exact", patch, before.formed, info, base)
        what = f"a patch of chunk {facts.chunk_id[:12]} was not kept"
        return [Owed(former.store, [PatchRecord(facts.chunk_id, *made)], former.losses, what)]

    return deltas, form


def form_within(former: Former, deltas: Deltas, canonical: Copy) -> tuple[Sized, float]:
    """The patch of a deficit under the former's budget, and its error (`kamera.ops.patch_error`).

    Under a ``max_error`` rank and bytes double until it leaves out no more, or has full rank.
    """
    budget: PatchBudget = former.budget
    while True:
        sized = budget.form(deltas, former.backbone.layout, canonical.kv)
        error = patch_error(deltas, sized.formed.patch)
        is_whole = budget.rank >= canonical.positions.shape[1] and budget.share in (None, 1.0)
        if former.max_error is None or error <= former.max_error or is_whole:
            return sized, error
        budget = budget.double(canonical.kv)
