"""Recipes of windows, out of seats and rows alone, and the objects that a recipe needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kamera.engines import Part, Recipe, RowKey
from kamera.patches import Catalogue, Copy, Former, canonical_of, put_owed
from kamera.store import CanonicalRecord, Context, conditioned_record
from kamera.trust import Guarantee
from kamera.window.seats import Offset, Seat, Seats
from kamera.window.state import Resident, WindowState

_HERE = "its KV was run in its window and stands under no key: {}"


@dataclass(frozen=True)
class RecipeFacts:
    """What a recipe says beside seats and rows: names and token ids.

    ``ids`` are those of the chunks, by chunk id, ``rank`` the largest of patches.
    ``contents`` are the digests of the conditioned KV that is stored, by number of its seat. ``remedy`` says
    what stores KV that has no key.
    """

    context: Context
    anchor_ids: tuple[int, ...]
    ids: Mapping[str, tuple[int, ...]]
    rank: int | None
    contents: Mapping[int, str]
    remedy: str = "keep_kv(window) stores it"


def recipe(seats: Seats, rows: Catalogue, told: RecipeFacts) -> Recipe:
    """The recipe of a window: what a plan's seats, too, can be written down as, if all of them is stored."""
    own, back, parts, start = told.context, tuple(-f for f in seats.frame), list[Part](), len(told.anchor_ids)
    for seat, worth in zip(seats.seats, seats.worths, strict=True):
        parts.append(_part(seat, worth, start, back, rows, told))
        start += seat.length
    anchor = RowKey.of(own, "anchor", own.anchor) if has_anchor(rows) else None
    return Recipe(own, anchor, told.anchor_ids, tuple(parts))


def has_anchor(rows: Catalogue) -> bool:
    """True if the anchor of these rows is stored."""
    plain = replace(rows.context, kv="as-is")
    return rows.store.has(plain, plain.anchor, None, "anchor")


def recipe_of(former: Former, state: WindowState) -> Recipe:
    """The recipe of a window in ``state``."""
    ids = {facts.chunk_id: tuple(facts.encoded.input_ids.tolist()) for facts in state.facts}
    contents = {
        seat.number: resident.shown.content
        for seat, resident in zip(state.seats.seats, state.residents, strict=True)
        if _is_kept(former, seat, resident.shown)
    }
    anchor_ids = tuple(former.anchor.input_ids.tolist())
    recipe_facts = RecipeFacts(former.context, anchor_ids, ids, former.budget.rank, contents)
    return recipe(state.seats, former.catalogue, recipe_facts)


def _is_kept(former: Former, seat: Seat, copy: Copy) -> bool:
    if not copy.content:
        return False
    key = (seat.chunk_id, seat.shown.antecedents, "conditioned", copy.content)
    return former.store.has(replace(former.context, kv="as-is"), *key)


def _part(seat: Seat, worth: Guarantee, start: int, back: Offset, rows: Catalogue, info: RecipeFacts) -> Part:
    source, spot = seat.shown, seat.spot.shift(back)
    place = (start, spot.low, source.home.distance(spot), worth, source.antecedents)
    return Part(seat.chunk_id, info.ids[seat.chunk_id], *place, *_rows_of(seat, rows, info))


def _is_canonical(seat: Seat, own: Context) -> bool:
    """True for KV in the form in which the store keeps the chunk's canonical."""
    return seat.shown.canonical and seat.shown.lossy == own.lossy


def _rows_of(seat: Seat, rows: Catalogue, info: RecipeFacts) -> tuple[RowKey | None, RowKey | None, str]:
    """The rows of the KV that a seat shows, and of its patch; or why it has none."""
    own, source, chunk_id = info.context, seat.shown, seat.chunk_id
    if not _is_canonical(seat, own):
        content = info.contents.get(seat.number)
        if content is None:
            return None, None, _HERE.format(info.remedy)
        return RowKey.of(own, "conditioned", chunk_id, source.antecedents, content), None, ""
    patch = source.patch
    kv = RowKey.of(own, "canonical", chunk_id, anchor="" if patch is None else patch.base)
    if kv.context.anchor == own.anchor and not rows.has_canonical(chunk_id):
        return None, None, "its canonical is not stored yet, or no longer: window.flush(), or append it again"
    if patch is None:
        return kv, None, ""
    row = rows.patch(chunk_id, patch.antecedents, patch.kind, patch.base)
    if row is None or row.formed != patch.formed or patch.created not in (None, row.created):
        return None, None, "its patch has left the store, or is another by now: recall it"
    stamp = patch.formed, row.created, info.rank
    return kv, RowKey.of(own, patch.kind, chunk_id, patch.antecedents, patch.base, *stamp), ""


def store_state(former: Former, state: WindowState) -> WindowState:
    """Store all KV that ``state`` shows. Returns ``state`` with the digests of KV that is no canonical."""
    tensors = dict(state.tensors)
    for seat in state.seats.seats:
        resident = tensors[seat.number]
        if _is_canonical(seat, former.context):
            if resident.shown.patch is None and not former.catalogue.has_canonical(seat.chunk_id):
                put_owed([former.records_to_put(resident.facts, resident.shown)[1]])
            continue
        record = _conditioned_record(former, seat, resident)
        former.store.put(record)
        tensors[seat.number] = replace(resident, copy=replace(resident.copy, content=record.content))
    return replace(state, tensors=tensors)


def _conditioned_record(former: Former, seat: Seat, resident: Resident) -> CanonicalRecord:
    record = canonical_of(former, resident.facts, resident.shown)
    return conditioned_record(
        replace(record, info={**record.info, "formed": seat.formed}), seat.shown.antecedents
    )
