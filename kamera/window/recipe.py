"""Recipes of windows, out of seats and rows alone, and the objects that a recipe needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from kamera.engines import Base, Part, Recipe, RowKey
from kamera.patches import Catalogue, Copy, Former, canonical_of
from kamera.store import CanonicalRecord, Context, conditioned
from kamera.trust import Guarantee
from kamera.window.seats import Offset, Seat, Seats
from kamera.window.state import Resident, WindowState

_HERE = "its KV was run in its window and stands under no key: window.keep() stores it"


class Stands(NamedTuple):
    """KV that stands in a store under its content: the antecedents it is stored with, and its digest."""

    antecedents: tuple[str, ...]
    content: str


@dataclass(frozen=True)
class RecipeFacts:
    """What a recipe says beside seats and rows: names and token ids.

    ``ids`` are those of the chunks, by chunk id, ``rank`` the largest of patches that are not proved.
    ``stands`` names the conditioned KV that is stored, by number of its seat. ``anchored``: the anchor is.
    """

    context: Context
    anchor_ids: tuple[int, ...]
    ids: Mapping[str, tuple[int, ...]]
    rank: int | None
    stands: Mapping[int, Stands]
    anchored: bool = True
    tail: str = ""
    reopen: str = ""


def recipe(seats: Seats, rows: Catalogue, told: RecipeFacts) -> Recipe:
    """The recipe of a window: what a plan's seats, too, can be written down as, if all of them is stored."""
    own, back, parts, start = told.context, tuple(-f for f in seats.frame), list[Part](), len(told.anchor_ids)
    for seat, worth in zip(seats.seats, seats.worths, strict=True):
        parts.append(_part(seat, worth, start, back, rows, told))
        start += seat.length
    return Recipe(
        own,
        RowKey.of(own, "anchor", own.anchor) if told.anchored else None,
        told.anchor_ids,
        tuple(parts),
        told.tail,
        told.reopen,
    )


def recipe_of(former: Former, state: WindowState) -> Recipe:
    """The recipe of a window in ``state``."""
    ids = {r.facts.chunk_id: tuple(r.facts.encoded.input_ids.tolist()) for r in state.residents}
    stands = {
        r.number: Stands(r.seat.shown.antecedents, r.shown.content)
        for r in state.residents
        if _is_kept(former, r.seat, r.shown)
    }
    anchor, plain = former.anchor, replace(former.context, kv="as-is")
    told = RecipeFacts(
        replace(former.context, probe=str(former.context.probe)),
        tuple(anchor.input_ids.tolist()),
        ids,
        former.budget.rank,
        stands,
        former.store.has(plain, plain.anchor, None, "anchor"),
        anchor.tail,
        anchor.reopen,
    )
    return recipe(state.seats, former.catalogue, told)


def _is_kept(former: Former, seat: Seat, copy: Copy) -> bool:
    if not copy.content:
        return False
    named = (seat.chunk_id, seat.shown.antecedents, "conditioned", copy.content)
    return former.store.has(replace(former.context, kv="as-is"), *named)


def _part(seat: Seat, worth: Guarantee, start: int, back: Offset, rows: Catalogue, told: RecipeFacts) -> Part:
    shown, position = seat.shown, seat.spot.moved(back).low
    offset = shown.home.offset(seat.spot.moved(back))
    assert offset is not None, "a plan seats no chunk where it cannot stand"
    kv, patch, missing = _rows_of(seat, rows, told)
    base: Base = "canonical" if _is_canonical(seat, told.context) else "conditioned"
    return Part(
        seat.chunk_id,
        told.ids[seat.chunk_id],
        start,
        position,
        offset,
        base,
        worth,
        shown.guarantee,
        shown.antecedents,
        None if missing else kv,
        None if missing else patch,
        missing,
    )


def _is_canonical(seat: Seat, own: Context) -> bool:
    """True for KV in the form in which the store keeps the chunk's canonical."""
    return seat.shown.canonical and seat.shown.lossy == own.lossy


def _rows_of(seat: Seat, rows: Catalogue, told: RecipeFacts) -> tuple[RowKey | None, RowKey | None, str]:
    """The rows of the KV that a seat shows, and of its patch; or why it has none."""
    own, shown, chunk_id = told.context, seat.shown, seat.chunk_id
    if not _is_canonical(seat, own):
        there = told.stands.get(seat.number)
        if there is None:
            return None, None, _HERE
        return RowKey.of(own, "conditioned", chunk_id, there.antecedents, there.content), None, ""
    name = shown.name
    anchor = name.base if name is not None and name.base else own.anchor
    kv = RowKey.of(own, "canonical", chunk_id, anchor=anchor)
    if anchor == own.anchor and not rows.has_canonical(chunk_id):
        return None, None, "its canonical is not stored yet, or no longer: window.flush(), or append it again"
    if not shown.patched:
        return kv, None, ""
    if name is None:
        return None, None, "its patch came with a saved window: recall it, which takes the stored one"
    row = rows.patch(chunk_id, name.antecedents, name.kind, name.base)
    if row is None or row.formed != name.formed or name.created not in (None, row.created):
        return None, None, "its patch has left the store, or is another by now: recall it"
    rank = told.rank if shown.proof is None else None
    stamp = name.formed, row.created, rank
    return kv, RowKey.of(own, name.kind, chunk_id, name.antecedents, name.base, *stamp), ""


def stored_state(former: Former, state: WindowState) -> WindowState:
    """Store all KV that ``state`` shows. Returns ``state`` with the digests of KV that is no canonical."""
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
