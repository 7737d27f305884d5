"""A window opened from a recipe, and the objects that a recipe of it needs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.engines import Engine, Part, Recipe, StoredPart, check_places, read_part
from kamera.ops import SampleSize
from kamera.patches import Copy, Former, Losses, anchor_of, canonical_of
from kamera.store import CanonicalRecord, ChunkStore, Context, conditioned
from kamera.trust import Certificate, ReusePolicy, Terms, guarantee_named
from kamera.window.apart import stage_of
from kamera.window.certified import agree
from kamera.window.naming import NamedRequest
from kamera.window.report import Tally
from kamera.window.requests import Restore
from kamera.window.run import carried_out
from kamera.window.seats import PatchName, Seat, Source
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState


class WindowParts(NamedTuple):
    """What a window is made of."""

    terms: Terms
    stage: Stage
    state: WindowState


def open_recipe(
    backbone: Engine,
    store: ChunkStore,
    recipe: Recipe,
    max_tokens: int | None,
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
    stage = replace(stage_of(backbone, store, anchor, terms.served, losses), max_tokens=max_tokens)
    pairs = zip(recipe.parts, materials, strict=True)
    residents = tuple(_resident(stage, part, material) for part, material in pairs)
    state = WindowState.of(residents, backbone.axes)
    with stage.former.operation():
        state = carried_out(NamedRequest(Restore()), state, stage, terms.served, Tally()).state
    return WindowParts(terms, stage, state)


def _resident(stage: Stage, part: Part, material: StoredPart) -> Resident:
    former, record = stage.former, material.record
    facts = former.encodings.behind(record)
    lossy, proof, sample = record.loss is not None, None, SampleSize.from_info(dict(record.info))
    kv = former.backbone.place(record.kv)
    copy = Copy(kv, record.positions, material.patch, lossy, content=record.content)
    home, name, size = stage.standing.spot(facts, record.positions), None, 0
    if part.patch is not None and material.patch is not None:
        row, size = part.patch, material.patch.nbytes
        name = PatchName(row.kind, row.antecedents, row.base, row.formed, row.created)
        info = former.catalogue.patch(row.chunk_id, row.antecedents, row.kind, row.base)
        if info is not None:
            proof, sample = info.proof if row.rank is None else None, info.sample
    source = Source(
        home,
        part.antecedents,
        part.made,
        part.base == "canonical",
        lossy,
        material.patch is not None,
        size,
        proof,
        sample,
        name,
    )
    formed = guarantee_named(str(record.info.get("formed", "exact")))
    seat = Seat(facts.chunk_id, facts.length, home.moved(part.offset), source, part.guarantee, formed)
    return Resident(facts, seat, copy)


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
