"""A window opened from a recipe, and the objects that a recipe of it needs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.engines import Engine, Part, Recipe, StoredPart, check_places, read_part
from kamera.ops import SampleSize
from kamera.patches import Copy, Former, Losses, anchor_of, canonical_of, guarantee_named
from kamera.store import CanonicalRecord, ChunkStore, Context, conditioned
from kamera.window.apart import stage_of
from kamera.window.bounds import Bounds, carried_out
from kamera.window.certificate import Certificate
from kamera.window.certified import Terms, agree
from kamera.window.naming import Named
from kamera.window.policy import ReusePolicy
from kamera.window.report import Tally
from kamera.window.requests import Restore
from kamera.window.seats import PatchName, Seat, Source
from kamera.window.slots import Resident
from kamera.window.stage import Stage
from kamera.window.state import WindowState


class WindowParts(NamedTuple):
    """What a window is made of."""

    terms: Terms
    stage: Stage
    bounds: Bounds
    state: WindowState


def open_recipe(
    backbone: Engine,
    store: ChunkStore,
    recipe: Recipe,
    bounds: Bounds,
    policy: ReusePolicy,
    certificate: Certificate | str | os.PathLike[str] | None,
) -> WindowParts:
    """Read what a recipe names; what the policy does not serve is placed anew, as by `KameraWindow.load`.

    Raises as `Executor.show`; an anchor that is not stored is prefilled.
    """
    context = recipe.context
    recipe.check(Context(backbone.fingerprint, context.anchor, store.tenant, store.kv))
    materials = [read_part(store, recipe, part) for part in recipe.parts]
    check_places(backbone, recipe, materials)
    ids = torch.tensor(recipe.anchor_ids, dtype=torch.int64)
    losses = Losses()
    anchor = anchor_of(backbone, ids, recipe.tail, recipe.reopen, store, losses, later=True)
    terms = agree(backbone, store, policy, certificate)
    stage = stage_of(backbone, store, anchor, terms.served, losses)
    pairs = zip(recipe.parts, materials, strict=True)
    residents = tuple(_resident(stage, part, material) for part, material in pairs)
    state = WindowState(residents, recipe.shift, (0,) * backbone.axes)
    with stage.former.operation():
        state = carried_out(Named(Restore()), state, bounds, stage, terms.served, Tally()).state
    return WindowParts(terms, stage, bounds, state)


def _resident(stage: Stage, part: Part, material: StoredPart) -> Resident:
    former, record = stage.former, material.record
    facts = former.encodings.behind(record)
    copy = Copy(
        former.backbone.place(record.kv),
        record.positions,
        material.patch,
        part.made,
        part.antecedents,
        part.base == "canonical",
        record.loss is not None,
        sample=SampleSize.from_info(dict(record.info)),
        content=record.content,
    )
    home, name, size = stage.standing.spot(facts, record.positions), None, 0
    if part.patch is not None and material.patch is not None:
        row, size = part.patch, material.patch.nbytes
        name = PatchName(row.kind, row.antecedents, row.base, row.formed, row.created)
        info = former.catalogue.patch(row.chunk_id, row.antecedents, row.kind, row.base)
        if info is not None:
            copy = replace(copy, proof=info.proof if row.rank is None else None, sample=info.sample)
    source = Source(
        home,
        copy.antecedents,
        copy.guarantee,
        copy.canonical,
        copy.lossy,
        material.patch is not None,
        size,
        copy.proof,
        copy.sample,
        name,
    )
    formed = guarantee_named(str(record.info.get("formed", "exact")))
    seat = Seat(facts.chunk_id, facts.length, home.moved(part.offset), source, part.guarantee, formed)
    return Resident(facts, seat, copy)


def kept(former: Former, state: WindowState) -> WindowState:
    """``state`` with all KV that it shows stored: canonicals, and what else there is by its content."""
    made: list[Resident] = []
    for resident in state.residents:
        shown = resident.shown
        if shown.canonical and shown.lossy == former.context.lossy:
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
    copy = resident.shown
    record = canonical_of(former, resident.facts, copy)
    told = {"formed": resident.seat.formed, **({} if copy.sample is None else copy.sample.to_info())}
    return conditioned(replace(record, info={**record.info, **told}), copy.antecedents)
