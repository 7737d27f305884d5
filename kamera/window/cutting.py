"""A text in parts, where an edit touches its inside: KV is causal, so each part keeps the KV that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kamera.content import Encoded
from kamera.errors import quote
from kamera.ops import CodedKV, kv_slice
from kamera.patches import Copy, Facts
from kamera.window.contents import serial
from kamera.window.seats import Seat, new_number
from kamera.window.spots import Spots
from kamera.window.state import Resident, Slot, WindowState
from kamera.window.window import KameraWindow


@serial
def cut(window: KameraWindow, slot: Slot | int, at: Sequence[int]) -> tuple[Slot, ...]:
    """Make a text several chunks, cut before these of its tokens (ascending): no forward, no KV changes.

    Returns the slots of its parts. What was not prefilled in this window as it stands (a picture, a patched
    or canonical chunk) is not cut, and its slot returned. ValueError for tokens that are not inside.
    """
    state = window._state
    index = state.index(slot)
    seat, whole = state.seats.seats[index], state.residents[index]
    borders = [*pairwise([0, *at, whole.facts.length])]
    if any(start >= stop for start, stop in borders):
        raise ValueError(f"at {quote(at)} are no ascending tokens inside of {whole.facts.length}")
    if not _is_plain(seat, whole):
        return (window.slots[index],)
    label, parts = whole.facts.label, list[Facts]()
    for start, stop in borders:
        ids = whole.facts.encoded.input_ids[start:stop]
        chunk = window._backbone.chunk_from_tensors(ids, label=label)
        parts.append(Facts(chunk.id, Encoded(ids, {}, {}), label))
    window._state, window._plans = _cut(state, index, parts, window._stage.spots), ()
    return window.slots[index : index + len(parts)]


def _is_plain(seat: Seat, resident: Resident) -> bool:
    """True for a text that shows the KV of its prefill."""
    facts, copy, source = resident.facts, resident.copy, seat.source
    text = not (facts.encoded.tensors or facts.position_inputs or source.home.shape)
    prefilled = copy.patch is None and seat.clean is None and not source.canonical
    return text and prefilled and not isinstance(copy.kv, CodedKV)


def _cut(state: WindowState, index: int, facts: Sequence[Facts], spots: Spots) -> WindowState:
    """The state with a text in parts, each prefilled behind those before it."""
    row, copy, start = state.seats.seats, state.residents[index].copy, 0
    seat, parts, tensors = row[index], list[Seat](), dict(state.tensors)
    behind = seat.source.antecedents
    for part in facts:
        stop = start + part.length
        places = copy.positions[:, start:stop]
        home = spots.spot(part, places)
        source = replace(seat.source, home=home, antecedents=behind)
        new = replace(
            seat,
            chunk_id=part.chunk_id,
            length=part.length,
            spot=home.shift(seat.offset),
            source=source,
            archived=False,
            number=new_number(),
        )
        parts.append(new)
        tensors[new.number] = Resident(part, Copy(kv_slice(copy.kv, start, stop), places))
        behind, start = (*behind, part.chunk_id), stop
    named = [part.chunk_id for part in facts]
    others = [_with_parts(other, seat.chunk_id, named) for other in row[index + 1 :]]
    del tensors[seat.number]
    return WindowState(replace(state.seats, seats=(*row[:index], *parts, *others)), tensors)


def _with_parts(seat: Seat, whole: str, parts: Sequence[str]) -> Seat:
    """A chunk whose antecedents name the parts in place of the whole: the tokens are the same."""
    source = seat.source
    if whole not in source.antecedents:
        return seat
    behind = tuple(n for name in source.antecedents for n in (parts if name == whole else (name,)))
    return replace(seat, source=replace(source, antecedents=behind))
