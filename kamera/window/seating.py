"""Seating of chunks: the frame they share, the spot of the next chunk, and the check for room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kamera.errors import NotRelocatable, WindowFull
from kamera.store import ObjectInfo
from kamera.window.requests import Newcomer
from kamera.window.seats import Offset, Seat, Seats, Source, Spot
from kamera.window.steps import Limits

DRIFT = 4096
"""Largest offset of a frame before the keys are rotated back.

The model computes angles in float32, whose precision falls with the position; 4096 positions cost no more
than a window of that length.
"""


def choose_frame(
    limits: Limits, state: Seats, staying: Sequence[Seat], spots: Sequence[Spot]
) -> tuple[Offset, list[Seat]]:
    """The frame in which the most tokens stay in place, and ``staying`` in it.

    ``spots`` are the compact ones, of ``staying`` and of the chunks behind it. The frame is zero if it would
    reach too far out.
    """
    home = (0,) * len(state.frame)
    if not staying:
        return home, []
    own_spots = spots[: len(staying)]
    extent = max(map(max, [spot.high for spot in spots]))
    offsets = [spot.offset(seat.spot) for seat, spot in zip(staying, own_spots, strict=True)]
    together = offsets[0]
    as_one = together is not None and set(offsets) == {together} and min(together) >= 0
    if together is not None and as_one and not is_too_far(limits, together, extent):
        return together, list(staying)
    votes = Counter({state.frame: limits.anchor})
    for seat, offset in zip(staying, offsets, strict=True):
        if offset is not None:
            votes[offset] += seat.length
    frame = votes.most_common(1)[0][0]
    frame = home if min(frame) < 0 or is_too_far(limits, frame, extent) else frame
    return frame, [seat.at(spot.shift(frame)) for seat, spot in zip(staying, own_spots, strict=True)]


def is_too_far(limits: Limits, frame: Offset, extent: int) -> bool:
    """True if a frame takes positions up to ``extent`` too far out.

    Half of the model's positions is reserved for questions and answers: no frame takes any of them.
    """
    return max(frame) > DRIFT or (any(frame) and extent + max(frame) > limits.reach.last // 2)


def count_leaving(limits: Limits, state: Seats, chunk: Newcomer) -> int:
    """The number of oldest chunks that leave for ``chunk``; WindowFull for one larger than the window."""
    if limits.max_tokens is None:
        return 0
    room = limits.max_tokens - limits.anchor
    if chunk.length > room:
        raise WindowFull(
            f"chunk {chunk.chunk_id[:12]} has {chunk.length} tokens, the window has room for {room} "
            f"(max_tokens={limits.max_tokens}, anchor {limits.anchor}): raise max_tokens "
            "or cut the chunk smaller"
        )
    room -= chunk.length + sum(s.length for s in state.seats)
    n = 0
    while room < 0:
        room += state.seats[n].length
        n += 1
    return n


def tail(limits: Limits, state: Seats, chunk: Newcomer) -> tuple[Seats, Spot]:
    """The spot of the next chunk; a frame that drifted too far out returns to zero first."""
    spot = limits.places.compact([*state.chunk_ids, chunk.chunk_id])[-1]
    if is_too_far(limits, state.frame, spot.top):
        back = tuple(-f for f in state.frame)
        state = Seats.home([seat.at(seat.spot.shift(back)) for seat in state.seats], len(back))
    spot = spot.shift(state.frame)
    limits.reach.check(spot.top)
    return state, spot


def canonical_source(
    limits: Limits, chunk_id: str, *, lossy: bool | None = None, base: ObjectInfo | None = None
) -> Source:
    """The source of a canonical: the window's own, behind its anchor, or one behind that of ``base``."""
    lossy = limits.lossy if lossy is None else lossy
    (home,) = limits.places.compact([chunk_id])
    if base is not None:
        home = home.shift((base.behind - limits.anchor,) * len(home.low))
    return Source(home, (), "patched" if lossy else "exact", canonical=True, lossy=lossy)


def check_room(limits: Limits, chunks: Sequence[Newcomer | Seat]) -> None:
    tokens = limits.anchor + sum([c.length for c in chunks])
    if limits.max_tokens is not None and tokens > limits.max_tokens:
        raise WindowFull(
            f"{len(chunks)} chunks make {tokens} tokens, the window holds {limits.max_tokens}: "
            "raise max_tokens, or let some leave"
        )


def check_stands(limits: Limits, seat: Seat) -> None:
    if seat.shown.home.offset(seat.spot) is None:
        raise NotRelocatable(
            f"chunk {seat.chunk_id[:12]} does not move as a whole: its tokens shift against each "
            "other at the new place (a clip cut out of a longer one?); append it anew"
        )
    limits.reach.check(seat.spot.top)
