"""A recipe: what an engine that schedules by itself needs to show a window."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from kamera.ops import digest
from kamera.patches import Former, Guarantee
from kamera.store import Context
from kamera.window.seats import Offset
from kamera.window.slots import Resident
from kamera.window.state import WindowState


@dataclass(frozen=True)
class RowKey:
    """A stored patch in the recipe's context: its kind, and the antecedents that it is stored under."""

    chunk_id: str
    antecedents: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Part:
    """A chunk in the sequence: its tokens ``start`` up to ``stop``, and its lowest position on each axis.

    ``antecedents`` are those of its KV. ``canonical``: its KV was computed right behind the anchor, at
    ``home``, and ``row`` is the stored patch added to it, if any. KV that is not canonical was prefilled
    behind its antecedents.
    """

    chunk_id: str
    start: int
    stop: int
    position: Offset
    home: Offset
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    canonical: bool
    row: RowKey | None = None


@dataclass(frozen=True)
class Recipe:
    """A window for another engine: token ids, borders, places, rows, guarantees.

    ``context`` is the store's, ``anchor`` the number of leading tokens before the first
    part. ``salt`` is "" if every part is exact, so the sequence is what a prefill of its tokens makes; else a
    digest of all that its KV depends on beside them. An engine's prefix cache has to keep sequences of
    different salts apart.
    """

    context: Context
    ids: tuple[int, ...]
    anchor: int
    parts: tuple[Part, ...]
    salt: str

    def to_json(self) -> str:
        """The recipe as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))


def recipe_of(former: Former, state: WindowState) -> Recipe:
    """The recipe of a window in ``state``."""
    at, parts = former.anchor.length, []
    back = tuple(-f for f in state.frame)
    for resident, worth in zip(state.residents, state.worths, strict=True):
        stop = at + resident.seat.length
        parts.append(_part(resident, worth, at, stop, back))
        at = stop
    ids = [former.anchor.input_ids, *(r.facts.encoded.input_ids for r in state.residents)]
    whole = tuple(int(i) for one in ids for i in one.tolist())
    plain = all(part.guarantee == "exact" for part in parts) and not any(state.shift)
    context = replace(former.context, probe=str(former.context.probe))
    shift = ",".join(map(str, state.shift))
    said = json.dumps([asdict(part) for part in parts], sort_keys=True)
    salt = "" if plain else digest("kamera.recipe.v1", json.dumps(asdict(context)), shift, said)[:32]
    return Recipe(context, whole, former.anchor.length, tuple(parts), salt)


def _part(resident: Resident, worth: Guarantee, start: int, stop: int, back: Offset) -> Part:
    seat, shown = resident.seat, resident.seat.shown
    kind = shown.guarantee if shown.guarantee in ("orbit", "sampled") else "exact"
    row = RowKey(seat.chunk_id, shown.antecedents, kind) if shown.patched else None
    return Part(
        seat.chunk_id,
        start,
        stop,
        seat.spot.moved(back).low,
        shown.home.low,
        worth,
        shown.antecedents,
        shown.canonical,
        row,
    )
