"""A window opened from a recipe, and the objects that a recipe of it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kamera.patches import Former, canonical_of
from kamera.store import CanonicalRecord, conditioned
from kamera.trust import Terms
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState


class WindowParts(NamedTuple):
    """What a window is made of."""

    terms: Terms
    stage: Stage
    state: WindowState


def stored_state(former: Former, state: WindowState) -> WindowState:
    """``state`` with all KV that it shows stored: canonicals, and what else there is by its content."""
    made: list[Resident] = []
    for resident in state.residents:
        shown, source = resident.shown, resident.seat.shown
        if source.canonical and source.lossy == former.context.lossy:
            if shown.patch is None and not former.catalogue.has_canonical(resident.facts.chunk_id):
                former.archive(resident.facts, shown)
            made.append(resident)
            continue
        record = _conditioned(former, resident)
        former.store.put(record)
        made.append(replace(resident, copy=replace(resident.copy, content=record.content)))
    after = replace(state, residents=tuple(made))
    after.__dict__["seats"] = state.seats
    return after


def _conditioned(former: Former, resident: Resident) -> CanonicalRecord:
    source = resident.seat.shown
    record = canonical_of(former, resident.facts, resident.shown)
    told = {"formed": resident.seat.formed, **({} if source.sample is None else source.sample.to_info())}
    return conditioned(replace(record, info={**record.info, **told}), source.antecedents)
