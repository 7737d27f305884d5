"""Makes plans of operations, chunk by chunk, before anything runs: no tensor, no model, no file.

A plan is made from a request and a view: a window's seats, stored rows, a policy, and the limits of the
window. It lists every step and its cost; `kamera.window.run` acts on it, and decides nothing. JSON both ways.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import permutations
from operator import attrgetter, eq
from typing import Any, Literal, Protocol, get_type_hints

import cattrs
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

from kamera.content import Encoded
from kamera.engines import Offset, PositionLimits, Spent
from kamera.errors import NotRelocatable, PolicyRefused, WindowFull, quote
from kamera.patches import Catalogue, Stored, by_form, possible_names, stored_patch, worth_harvesting
from kamera.store import ObjectInfo, chunks_of
from kamera.trust import (
    ArchiveRule,
    Guarantee,
    OnLeave,
    ReusePolicy,
    at_least,
    guarantee_named,
    prefilled_behind,
    weakest,
)
from kamera.window.requests import (
    Append,
    Arrange,
    Condition,
    Evict,
    Newcomer,
    Recall,
    Reorder,
    Request,
    Slide,
    Without,
)
from kamera.window.slots import Offer, Seat, Seats, Source, Spot, new_number

DRIFT = 4096
"""Largest offset of a frame before the keys are rotated back.

The model computes angles in float32, whose precision falls with the position; 4096 positions cost no more
than a window of that length.
"""

Reason = Literal["", "new", "edited", "policy", "glue", "no canonical", "no patch", "refused", "budget"]
"""Why a chunk runs although stored KV could serve.

It was never seen. It begins as another text, and its end is new. The policy serves no stored patch. It is a
text too short to keep. No canonical is stored, or no patch behind these antecedents. The patch was refused,
or is smaller, or leaves out more, than the policy asks. "" for none of these: its KV was not to be had.
"""


class Places(Protocol):
    """Positions of chunks one after another behind the anchor, and their ``form`` as in `form_of`."""

    def compact(self, chunks: Sequence[Encoded]) -> list[Spot]: ...
    def form(self, encoded: Encoded) -> Hashable | None: ...


@dataclass(frozen=True)
class View:
    """What a plan is made from, beside its request: a window's seats, stored rows, a policy, and limits.

    ``encoded`` are those of all chunks that it may seat, by id. ``anchor`` is the number of the anchor's
    tokens, ``reach`` as `Engine.limits`. ``lossy``: canonicals are stored in codes. ``joins`` as in
    `ModelFacts`. ``glue`` are the ids of texts that are glue (`is_glue`), in a request whose chunks are parts
    of a conversation. Background work that waits already makes the canonicals of ``pending``.
    """

    seats: Seats
    rows: Catalogue
    policy: ReusePolicy
    anchor: int
    reach: PositionLimits
    max_tokens: int | None
    lossy: bool
    places: Places
    encoded: Mapping[str, Encoded]
    joins: bool = False
    glue: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]:
        """Places of chunks one after another behind the anchor."""
        return self.places.compact([self.encoded[chunk_id] for chunk_id in chunk_ids])

    def choose_frame(
        self, state: Seats, staying: Sequence[Seat], spots: Sequence[Spot]
    ) -> tuple[Offset, list[Seat]]:
        """The frame in which the most tokens stay in place, and ``staying`` in it.

        ``spots`` are the compact ones, of ``staying`` and of the chunks behind it. The frame is zero if it
        would reach too far out.
        """
        home = (0,) * len(state.frame)
        if not staying:
            return home, []
        own_spots = spots[: len(staying)]
        extent = max(map(max, [spot.high for spot in spots]))
        offsets = [spot.offset(seat.spot) for seat, spot in zip(staying, own_spots, strict=True)]
        together = offsets[0]
        as_one = together is not None and set(offsets) == {together} and min(together) >= 0
        if together is not None and as_one and not self.is_too_far(together, extent):
            return together, list(staying)
        votes = Counter({state.frame: self.anchor})
        for seat, offset in zip(staying, offsets, strict=True):
            if offset is not None:
                votes[offset] += seat.length
        frame = votes.most_common(1)[0][0]
        frame = home if min(frame) < 0 or self.is_too_far(frame, extent) else frame
        return frame, [seat.at(spot.shift(frame)) for seat, spot in zip(staying, own_spots, strict=True)]

    def is_too_far(self, frame: Offset, extent: int) -> bool:
        """True if a frame takes positions up to ``extent`` too far out.

        Half of the model's positions is reserved for questions and answers: no frame takes any of them.
        """
        return max(frame) > DRIFT or (any(frame) and extent + max(frame) > self.reach.last // 2)

    def count_leaving(self, state: Seats, chunk: Newcomer) -> int:
        """The number of oldest chunks that leave for ``chunk``; WindowFull for one larger than the window."""
        if self.max_tokens is None:
            return 0
        room = self.max_tokens - self.anchor
        if chunk.length > room:
            raise WindowFull(
                f"chunk {chunk.chunk_id[:12]} has {chunk.length} tokens, the window has room for {room} "
                f"(max_tokens={self.max_tokens}, anchor {self.anchor}): raise max_tokens "
                "or cut the chunk smaller"
            )
        room -= chunk.length + sum(s.length for s in state.seats)
        n = 0
        while room < 0:
            room += state.seats[n].length
            n += 1
        return n

    def tail(self, state: Seats, chunk: Newcomer) -> tuple[Seats, Spot]:
        """The spot of the next chunk; a frame that drifted too far out returns to zero first."""
        spot = self.compact([*state.chunk_ids, chunk.chunk_id])[-1]
        if self.is_too_far(state.frame, spot.top):
            back = tuple(-f for f in state.frame)
            state = Seats.home([seat.at(seat.spot.shift(back)) for seat in state.seats], len(back))
        spot = spot.shift(state.frame)
        self.reach.check(spot.top)
        return state, spot

    def canonical_source(
        self, chunk_id: str, *, lossy: bool | None = None, base: ObjectInfo | None = None
    ) -> Source:
        """The source of a canonical: the window's own, behind its anchor, or one behind that of ``base``."""
        lossy = self.lossy if lossy is None else lossy
        (home,) = self.compact([chunk_id])
        if base is not None:
            home = home.shift((base.behind - self.anchor,) * len(home.low))
        return Source(home, (), "patched" if lossy else "exact", canonical=True, lossy=lossy)

    def check_room(self, chunks: Sequence[Newcomer | Seat]) -> None:
        tokens = self.anchor + sum([c.length for c in chunks])
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise WindowFull(
                f"{len(chunks)} chunks make {tokens} tokens, the window holds {self.max_tokens}: "
                "raise max_tokens, or let some leave"
            )

    def check_stands(self, seat: Seat) -> None:
        if seat.shown.home.offset(seat.spot) is None:
            raise NotRelocatable(
                f"chunk {seat.chunk_id[:12]} does not move as a whole: its tokens shift against each "
                "other at the new place (a clip cut out of a longer one?); append it anew"
            )
        self.reach.check(seat.spot.top)


@dataclass(frozen=True)
class Place:
    """A chunk is served from its canonical, with the patch of its source if there is one.

    ``tokens`` run first, behind the anchor, for a canonical that is missing; it is archived.
    """

    seat: Seat
    tokens: int = 0


@dataclass(frozen=True)
class TextHead:
    """KV of a chunk's next ``tokens``: that of the first of the chunk in seat ``number`` before an operation.

    It is moved by ``offset`` positions per axis from where it was computed; () for none.
    """

    number: int
    tokens: int
    offset: Offset = ()


@dataclass(frozen=True)
class Prefill:
    """A conditioned forward behind ``before``, of the tokens after ``heads``; ``new``: it was unseen.

    ``joined``: in one forward with the step before, whose chunk stands right in front of it. ``reason``: why
    no stored KV serves.
    """

    seat: Seat
    before: Seats
    new: bool = False
    heads: tuple[TextHead, ...] = ()
    joined: bool = False
    reason: Reason = ""

    @property
    def head_tokens(self) -> int:
        """Tokens whose KV is at hand."""
        return sum(head.tokens for head in self.heads)

    @property
    def tokens(self) -> int:
        """Tokens that run."""
        return self.seat.length - self.head_tokens


@dataclass(frozen=True)
class Archive:
    """A chunk's canonical is stored before it leaves or moves; ``tokens`` as for `Place`.

    ``later``: after the operation, as background work.
    """

    number: int
    tokens: int = 0
    later: bool = False


@dataclass(frozen=True)
class Harvest:
    """The patch of a chunk's prefill is formed and stored.

    ``base``: the anchor of the canonical it is formed against, "" for the window's own. ``tokens`` as for
    `Place`, ``later`` as for `Archive`.
    """

    number: int
    base: str = ""
    tokens: int = 0
    later: bool = False


@dataclass(frozen=True)
class Follow:
    """In the background a chunk runs behind its predecessor alone, and leaves the patch for that.

    It is what serves where most of its other antecedents have left (`ReusePolicy.max_departed`).
    """

    number: int
    predecessor: int
    tokens: int = 0


@dataclass(frozen=True)
class Clean:
    """A chunk shows its canonical; ``tokens`` as for `Place`."""

    number: int
    tokens: int = 0


Step = Place | Prefill | Archive | Harvest | Follow | Clean


def runs_of(steps: Iterable[Step]) -> list[list[Step]]:
    """The steps in groups: those joined to a forward stand with it, and so do chunks placed between them."""
    groups, at = list[list[Step]](), 0
    for step in steps:
        if not isinstance(step, Prefill):
            groups.append([step])
        elif not step.joined:
            at = len(groups)
            groups.append([step])
        else:
            between = groups[at + 1 :]
            places = [group for group in between if isinstance(group[0], Place)]
            groups[at] += [*(group[0] for group in places), step]
            groups[at + 1 :] = [group for group in between if group not in places]
    return groups


def cost_of(steps: Iterable[Step], encodes: int = 0) -> Spent:
    """What the steps of an operation run before background work, with its vision encodes."""
    run_steps = [step for step in steps if step.tokens]
    joined_count = sum(isinstance(step, Prefill) and step.joined for step in run_steps)
    return Spent(len(run_steps) - joined_count, sum(step.tokens for step in run_steps), encodes)


@dataclass(frozen=True)
class Plan:
    """An operation: the window before and after it, its steps in order, and their cost.

    It holds ids, places and keys of rows: no content and no tensor. `KameraWindow.run` runs it. ``request``
    is what was asked, with names alone, under ``policy``. A chunk of ``after`` without a step stays on the KV
    that it has, perhaps at another place or with another guarantee.

    ``later`` is the cost of what it leaves for background work.

    ``arrived`` is the number of the seat it concerns, ``left`` those of the seats that leave. ``heads`` are,
    by number, how many first tokens of prefilled chunks have their KV at hand.
    """

    request: Request
    policy: ReusePolicy
    operation: str
    before: Seats
    after: Seats
    steps: tuple[Step, ...]
    cost: Spent
    arrived: int | None = None
    left: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    later: Spent = field(default_factory=Spent)

    @property
    def heads(self) -> dict[int, int]:
        """See above."""
        return {s.seat.number: s.head_tokens for s in self.steps if isinstance(s, Prefill) and s.heads}

    @property
    def tail_prefill(self) -> Prefill | None:
        """The first of the prefills at the tail of the window after which nothing runs; None without any.

        The question shares a forward with them: what comes after it is background work.
        """
        steps = [
            step
            for step in self.steps
            if not (isinstance(step, Follow) or (isinstance(step, Archive | Harvest) and step.later))
        ]
        run = runs_of(steps)[-1] if steps else []
        first, prefills = run[0] if run else None, [step for step in run if isinstance(step, Prefill)]
        if not isinstance(first, Prefill) or len(prefills) < len(run):
            return None
        numbers = [seat.number for seat in (*first.before.seats, *(step.seat for step in prefills))]
        at_the_tail = numbers == [seat.number for seat in self.after.seats]
        return first if at_the_tail and first.before.frame == self.after.frame else None

    def comparable_text(self) -> str:
        """All that decides what runs, seats numbered as in `to_json`: equal for plans that do the same."""
        same = replace(self, cost=Spent(), later=Spent(), arrived=None, notes=())
        return json.dumps(_unstructure(same), sort_keys=True)

    def to_json(self) -> str:
        """The plan as JSON. Chunks of the window before it are numbered from 0, new ones behind them."""
        return json.dumps({"format": FORMAT, **_unstructure(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan out of `to_json`. Raises ValueError for anything else."""
        try:
            document = json.loads(text)
            if document.pop("format") != FORMAT:
                raise ValueError("it has another format")
            return converter().structure(document, Plan)
        except (ValueError, TypeError, KeyError, AttributeError, cattrs.BaseValidationError) as error:
            raise ValueError(
                f"{quote(text)} is no plan ({type(error).__name__}): write it with to_json"
            ) from None


FORMAT = 1
"""Of plans in JSON; one of another is refused."""


def _unstructure(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = converter().unstructure(plan)
    numbers = {seat.number: i for i, seat in enumerate(plan.before.seats)}
    return _renumber(document, numbers)


def _renumber(value: Any, numbers: dict[int, int]) -> Any:
    """The document with seats numbered in the order in which they come; unknown ones get the next number."""
    if isinstance(value, Mapping):
        return {
            key: numbers.setdefault(part, len(numbers))
            if key in ("number", "arrived") and part is not None
            else [numbers.setdefault(n, len(numbers)) for n in part]
            if key == "left"
            else _renumber(part, numbers)
            for key, part in value.items()
        }
    return [_renumber(part, numbers) for part in value] if isinstance(value, list | tuple) else value


@cache
def converter() -> cattrs.Converter:
    """Turns the values of plans into JSON types and back."""
    json_converter = make_converter(forbid_extra_keys=True)
    json_converter.register_unstructure_hook(ReusePolicy, ReusePolicy.to_info)
    json_converter.register_structure_hook(ReusePolicy, lambda info, _: ReusePolicy(**info))
    json_converter.register_unstructure_hook(Spent, Spent._asdict)
    json_converter.register_structure_hook(Spent, lambda counts, _: Spent(**counts))

    def name(value: Any, _: object = None) -> int | Newcomer:
        """A slot by its index, or a chunk that comes."""
        return value if isinstance(value, int) else json_converter.structure(value, Newcomer)

    def names(values: Any, _: object = None) -> tuple[int | Newcomer, ...]:
        return tuple(name(value) for value in values)

    def none(_: Any, __: object) -> tuple[()]:
        return ()

    fields: dict[type, tuple[str, Any]] = {
        Append: ("content", name),
        Recall: ("chunk", name),
        Evict: ("slot", name),
        Condition: ("slot", name),
    }
    for kind, (name_of, hook) in [*fields.items(), (Arrange, ("order", names)), (Arrange, ("among", none))]:
        json_converter.register_structure_hook_func(partial(eq, get_type_hints(kind)[name_of]), hook)
    configure_tagged_union(Request, json_converter)
    configure_tagged_union(Step, json_converter)
    return json_converter


def plan(request: Request, view: View) -> Plan:
    """The plan of a request with names alone: newcomers for contents, indices for slots.

    Raises the refusals of the operation: WindowFull, NotRelocatable, PolicyRefused.
    """
    while view.rows.gather():
        with suppress(Exception):  # for want of what is being asked for; else it is raised below, too
            _plan(request, view)
    return _plan(request, view)


def _plan(request: Request, view: View) -> Plan:
    planner, seats = Planner(request, view), view.seats
    match request:
        case Append(content=Newcomer() as chunk):
            return planner.append(chunk, request.archive)
        case Recall(chunk=Newcomer() as chunk):
            return planner.recall(chunk, request.move)
        case Slide(n):
            return planner.finish("slide", planner.leave(seats, range(n)))
        case Evict(int(index)):
            return planner.finish("evict", planner.leave(seats, [index]))
        case Reorder(order):
            same = next((i for i, index in enumerate(order) if index != i), len(order))
            after = planner.arrange(seats, [seats.seats[i] for i in order], same)
            return planner.finish("reorder", after)
        case Arrange():
            return planner.rearrange(request)
        case Condition(int(index), on):
            return planner.condition(index, on)
        case Without(index):
            others = [s for i, s in enumerate(seats.seats) if i != index]
            return planner.finish("without", planner.arrange(seats, others, index))
        case _:
            raise ValueError(f"{type(request).__name__} is not planned by itself: name its contents first")


class Planner:
    """Plans one request, chunk by chunk. Objects that the plan itself will have stored count as stored."""

    def __init__(self, request: Request, view: View) -> None:
        self.request, self.view = request, view
        self.before, self.rows, self.policy = view.seats, view.rows, view.policy
        is_session = isinstance(request, Arrange) and not request.archive
        self._forms_patches = not is_session or self.policy.admits("patched", "near")
        self.steps: list[Step] = []
        self.late_steps: list[Archive | Harvest | Follow] = []  # steps that are background work
        self.left_numbers: list[int] = []
        self.late_seats: dict[str, Seat] = {}  # chunks whose canonicals background work computes
        self.heads: dict[str, tuple[tuple[str, int], ...]] = {}
        self._wrapper: tuple[str, tuple[tuple[str, int], ...]] = ("", ())  # of a picture, by its id
        self._new_ids: set[str] = set()
        self._first_ids: set[str] = set()  # canonicals at hand that background work puts first
        self._followed: list[Seat] = []
        self._notes: list[str] = []
        self._formed: dict[tuple[str, tuple[str, ...], str], Guarantee] = {}  # patches of this plan

    # -- operations ----------------------------------------------------------------------------

    def append(self, chunk: Newcomer, archive: ArchiveRule | None) -> Plan:
        """A chunk at the tail, new or stored."""
        self.heads[chunk.chunk_id] = chunk.heads
        is_stored = self.base(chunk.chunk_id) is not None or self.rows.has_canonical(chunk.chunk_id)
        arrival = (
            self.arrive_stored(self.before, chunk)
            if is_stored
            else self.arrive_new(self.before, chunk, archive)
        )
        return self.finish("append", *arrival, chunk.encodes)

    def recall(self, chunk: Newcomer, move: bool) -> Plan:
        """An archived chunk at the tail; one that is in the window stays in place, unless it is to move."""
        seats, ids = self.before, self.before.chunk_ids
        if chunk.chunk_id not in ids:
            return self.finish("recall", *self.arrive_stored(seats, chunk))
        index = len(ids) - 1 - ids[::-1].index(chunk.chunk_id)
        if move and index < len(ids) - 1:
            return self.finish("recall", *self.arrive_stored(self.leave(seats, [index]), chunk))
        note = f"chunk {chunk.chunk_id[:12]} is in view at slot {index}, where it stays"
        note = note if move else f"{note}: move=True brings it to the tail"
        return self.finish("recall", seats, seats.seats[index].number, note=note)

    def rearrange(self, request: Arrange) -> Plan:
        """Seats of the window and newcomers in the order asked for; other seats leave.

        Chunks in front of the first change stay as they are. Those behind it are kept as they are ("keep"),
        or placed anew under the policy ("repair") or under a minimum of "exact" ("exact").
        """
        state, wanted, same = self.before, list[Seat | Newcomer](), 0
        for item in request.order:
            assert isinstance(item, int | Newcomer), "a request is planned with names alone"
            wanted.append(state.seats[item] if isinstance(item, int) else item)
        while same < min(len(wanted), len(state.seats)) and wanted[same] is state.seats[same]:
            same += 1
        if request.wrapper and self.view.joins:  # else words may attend to their picture
            self._wrapper = (wanted[same].chunk_id, request.wrapper)
        on_leave, policy = self._on_leave(request.on_leave), self.policy
        if on_leave == "exact":
            self.policy = self.policy.as_exact()
            same = next((i for i, s in enumerate(state.seats[:same]) if s.guarantee != "exact"), same)
        newcomers = [item for item in wanted if isinstance(item, Newcomer)]
        self.heads |= {chunk.chunk_id: chunk.heads for chunk in newcomers if chunk.heads}
        numbers = {item.number for item in wanted if isinstance(item, Seat)}
        self.left_numbers += [self.archive_leaving(s).number for s in state.seats if s.number not in numbers]
        self.view.check_room(wanted)
        after = self.arrange(state, wanted, same, self.policy.as_repairing(), on_leave == "keep")
        self.policy = policy
        self._owe_canonicals(request.recurring)
        return self.finish(request.operation, after, encodes=sum(chunk.encodes for chunk in newcomers))

    def condition(self, index: int, on: bool) -> Plan:
        """A chunk shown clean (its canonical), or conditioned again."""
        row = list(self.before.seats)
        if on != (row[index].clean is None):
            row[index] = self.switch(row[index] if on else self.archive(row[index]), on)
        return self.finish("condition", replace(self.before, seats=tuple(row)), row[index].number)

    def finish(
        self, operation: str, after: Seats, arrived: int | None = None, encodes: int = 0, note: str = ""
    ) -> Plan:
        """The plan that leads to ``after``. Raises NotRelocatable for a chunk that cannot move there."""
        old_ids = set(map(id, self.before.seats))
        for seat in after.seats:
            if id(seat) not in old_ids:
                self.view.check_stands(seat)
        return Plan(
            self.request,
            self.policy,
            operation,
            self.before,
            after.with_said(None),
            (*self.steps, *self.late_steps),
            cost_of(self.steps, encodes),
            arrived,
            tuple(self.left_numbers),
            tuple(dict.fromkeys([*((note,) if note else ()), *self._notes])),
            self.later_cost(),
        )

    # -- arriving ------------------------------------------------------------------------------

    def arrive_stored(self, state: Seats, chunk: Newcomer) -> tuple[Seats, int]:
        """Place an archived chunk at the tail by the best means the policy admits."""
        state, spot = self.view.tail(self._make_room(state, chunk), chunk)
        seat = self.place_chunk(chunk, state, spot)
        return state.with_seat(seat), seat.number

    def arrive_new(self, state: Seats, chunk: Newcomer, archive: ArchiveRule | None) -> tuple[Seats, int]:
        """Prefill an unseen chunk in context at the tail.

        It is archived and harvested now or when it leaves; None: as the policy's `forms` says.
        """
        state, spot = self.view.tail(self._make_room(state, chunk), chunk)
        if not state.seats:  # leading: its prefill behind the anchor is the canonical itself
            seat = self.place_chunk(chunk, state, spot)
        else:
            seat = self._prefill(chunk, state, spot, new=True, reason="new")
            if archive == "now" or (archive is None and self.policy.forms == "always"):
                seat = self.archive(seat)
            elif archive is None and self.policy.on_leave == "keep" and self.policy.minimum != "exact":
                self.leave_canonical_for_later(seat)  # when it leads it is served from that
                seat = replace(seat, archived=True)
        state = state.with_seat(seat)
        if self.rows.has_departed:
            self.follow(state, len(state.seats) - 1)
        return state, seat.number

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, state: Seats, indices: Sequence[int]) -> Seats:
        """Remove chunks; those behind them survive, relocated.

        Under another ``on_leave`` of the policy than to keep them they are placed anew instead. The frame
        moves with the larger part of the remaining chunks, so that its keys are not rotated.
        """
        leavers = set(indices)
        for i in indices:
            self.left_numbers.append(self.archive_leaving(state.seats[i]).number)
        first = min(indices)
        others = [s for i, s in enumerate(state.seats) if i not in leavers]
        on_leave = self._on_leave(self.policy.on_leave)
        if on_leave == "repair":
            return self.arrange(state, others, first, self.policy.as_repairing())
        if on_leave == "exact":
            first = next((i for i, s in enumerate(others[:first]) if s.guarantee != "exact"), first)
            return self.arrange(state, others, first, self.policy.as_exact())
        frame, seats = self.view.choose_frame(state, others, self.view.compact([c.chunk_id for c in others]))
        after = Seats(tuple(seats[:first]), frame)
        for seat in seats[first:]:
            after = after.with_seat(self.stay(seat, after))
        for i in range(first, len(after.seats)):
            self.follow(after, i)
        return after

    # -- rearranging ---------------------------------------------------------------------------

    def arrange(
        self,
        state: Seats,
        wanted: Sequence[Seat | Newcomer],
        same: int,
        own: ReusePolicy | None = None,
        keep: bool = False,
    ) -> Seats:
        """``wanted`` at compact positions; from index ``same`` on they are placed anew.

        ``own``: the policy for chunks of the window, which ``keep`` keeps as they are.
        """
        spots, policy = self.view.compact([c.chunk_id for c in wanted]), self.policy
        old_seats = {i: s for i, s in enumerate(wanted) if isinstance(s, Seat) and (keep or i < same)}
        others = [spot for i, spot in enumerate(spots) if i not in old_seats]
        compact = [*(spots[i] for i in old_seats), *others]
        frame, seats = self.view.choose_frame(state, list(old_seats.values()), compact)
        new_seats = dict(zip(old_seats, seats, strict=True))
        new = Seats(tuple(seats[:same]), frame)
        if new.frame == state.frame and same == len(state.seats):
            new = state  # what it knows of its seats is known
        for i, item in enumerate(wanted[same:], same):
            self.policy = own if own is not None and isinstance(item, Seat) else policy
            stays = self.stay(self._spend(new_seats[i]), new) if i in new_seats else None
            new = new.with_seat(stays or self._place_anew(item, new, spots[i].shift(frame)))
        self.policy = policy
        return new

    def _place_anew(self, item: Seat | Newcomer, before: Seats, spot: Spot) -> Seat:
        """A chunk of `arrange` that is placed anew: one of the window, or a newcomer."""
        if isinstance(item, Seat):
            item = self._spend(item)
            return self.place_chunk(item, before, spot)
        return self._take(item, before, spot) or self.place_chunk(item, before, spot, archived=False)

    def _on_leave(self, on_leave: OnLeave) -> OnLeave:
        """The treatment of chunks that stay: a window that serves no survivors keeps none."""
        if self.policy.minimum == "exact":
            return "exact"
        return "repair" if on_leave == "keep" and not self.policy.keeps("survivor") else on_leave

    def _make_room(self, state: Seats, chunk: Newcomer) -> Seats:
        indices = range(self.view.count_leaving(state, chunk))
        return self.leave(state, indices) if indices else state

    def _owe_canonicals(self, recurring: Collection[str]) -> None:
        """Leave canonicals of prefilled recurring chunks to background work, if not made anyway."""
        if self.policy.on_miss != "form" or self.policy.forms == "always":
            return
        for seat in [step.seat for step in self.steps if isinstance(step, Prefill)]:
            short = seat.chunk_id in self.view.glue
            is_settled = seat.chunk_id in self.late_seats or short or seat.source.canonical
            if seat.chunk_id not in recurring or is_settled or self.base(seat.chunk_id) is not None:
                continue
            if not self.rows.has_canonical(seat.chunk_id):
                self.leave_canonical_for_later(seat)

    # -- one chunk -----------------------------------------------------------------------------

    def archive_leaving(self, seat: Seat) -> Seat:
        """Archive a chunk that leaves: now with the patch of its prefill, or its canonical later."""
        if self.policy.forms == "always":
            return self.archive(seat)
        if isinstance(self.request, Arrange) and not self.request.archive:
            return seat
        if seat.archived and seat.chunk_id not in self.rows.losses.unkept:
            return seat
        if self.base(seat.chunk_id) is None and not self.rows.has_canonical(seat.chunk_id):
            self.leave_canonical_for_later(seat)
        return replace(seat, archived=True)

    def leave_canonical_for_later(self, seat: Seat) -> None:
        """Leave the canonical of a chunk to background work."""
        self.late_steps.append(Archive(seat.number, later=True))
        self.late_seats[seat.chunk_id] = seat

    def archive(self, seat: Seat) -> Seat:
        """Archive a chunk: its canonical, and the patch of its prefill."""
        if seat.archived and seat.chunk_id not in self.rows.losses.unkept:
            return seat
        if self.base(seat.chunk_id) is None:
            self.steps.append(Archive(seat.number, self._compute(seat)))
        self._harvest(seat)
        return replace(seat, archived=True)

    def stay(self, seat: Seat, before: Seats) -> Seat:
        """A chunk that stays while its antecedents change, on the best KV at hand: no forward runs.

        Leading it is served from its canonical, behind chunks for which just a patch is stored with that.
        Where more than `ReusePolicy.max_departed` of its antecedents has left, it is served with the patch
        behind its own predecessor. Else it is a survivor.
        """
        kept = seat.staying(before)
        stands = seat.source.antecedents == before.lineage
        if stands or seat.clean is not None or self.policy.minimum == "exact":
            return kept
        source = self._at_hand(seat, before)
        if source is None or source.home.offset(seat.spot) is None:
            return kept
        if source.patch is not None and source.patch == seat.source.patch:
            return seat.relabel(source.guarantee)
        placed = replace(seat, source=source, guarantee=source.guarantee, formed="exact")
        self.steps.append(Place(placed))
        return placed

    def _at_hand(self, seat: Seat, before: Seats) -> Source | None:
        """Stored KV of a chunk that is better behind ``before`` than a survivor's."""
        if not (self.rows.has_canonical(seat.chunk_id) or seat.chunk_id in self._new_ids):
            return None
        if not before.seats:
            return self.view.canonical_source(seat.chunk_id, lossy=self.view.lossy)
        offer, behind = self.patch_behind(seat, before), before.tokens
        if offer is None and seat.source.departed(before.lengths) > self.policy.max_departed:
            offer, behind = self._patch_alone(seat, before.seats[-1].chunk_id), before.seats[-1].length
        return None if offer is None else self.view.canonical_source(seat.chunk_id).with_patch(offer, behind)

    def follow(self, seats: Seats, index: int) -> None:
        """Have the patch of the chunk at ``index`` behind its predecessor formed in the background.

        Only of one that two chunks stand before: the others will lead, or lead already.
        """
        if index < 2 or not self.policy.follows or self.view.lossy:
            return
        seat, predecessor = seats.seats[index], seats.seats[index - 1]
        names = (predecessor.chunk_id,)
        if (seat.chunk_id, names) in self.rows.followed or seat.chunk_id in (*self.view.glue, *names):
            return
        if not (self._is_made(seat) and self._is_made(predecessor)):
            return
        if self.rows.patch(seat.chunk_id, names, "exact") is None:
            self.late_steps.append(Follow(seat.number, predecessor.number))
            self._followed.append(seat)

    def _is_made(self, seat: Seat) -> bool:
        """True if a chunk's canonical is stored, or background work makes it."""
        made = (*self._new_ids, *self._first_ids, *self.late_seats, *self.view.pending)
        return seat.chunk_id in made or self.rows.has_canonical(seat.chunk_id)

    def switch(self, seat: Seat, on: bool) -> Seat:
        """The chunk conditioned, or showing its canonical, at its present place."""
        if on:
            return replace(seat, clean=None)
        self.steps.append(Clean(seat.number, self._compute(seat)))
        return replace(seat, clean=self.view.canonical_source(seat.chunk_id))

    def place_chunk(self, chunk: Newcomer | Seat, before: Seats, spot: Spot, archived: bool = True) -> Seat:
        """Place a chunk behind ``before`` by the best means the policy admits.

        Of one of the window, KV prefilled behind the very same exact antecedents is reused as it is, and a
        clean view stays one. ``archived``: what is known of a newcomer.
        """
        source, old = self.best_source(chunk, before), chunk if isinstance(chunk, Seat) else None
        number = new_number() if old is None else old.number
        if old is not None and source is old.source:
            seat = replace(old, spot=spot, guarantee=source.guarantee, formed="exact", clean=None)
        elif source is not None and self._leads(chunk, before, spot, source):
            home = None if any(before.frame) else source
            why: Reason = "new" if old is None else "no canonical"
            seat = self._prefill(chunk, before, spot, number=number, leading=home, reason=why)
            if home is not None:
                self.late_steps.append(Archive(seat.number, later=True))
                self._first_ids.add(seat.chunk_id)
                seat = replace(seat, archived=True)
        elif source is not None:
            seat = Seat(chunk.chunk_id, chunk.length, spot, source, source.guarantee, number=number)
            self.steps.append(Place(seat, 0 if source.patch and source.patch.base else self._compute(chunk)))
        else:
            archived, reason = archived if old is None else old.archived, self._reason(chunk, before)
            seat = self._prefill(chunk, before, spot, archived=archived, number=number, reason=reason)
            if self.policy.on_miss == "form":
                self._miss(seat)
        return seat if old is None or old.clean is None else self.switch(seat, False)

    # -- inside --------------------------------------------------------------------------------

    def best_source(self, chunk: Newcomer | Seat, before: Seats) -> Source | None:
        """The best KV that is admitted: that in the window, or a canonical; None if a forward is needed."""
        base, glue = self.base(chunk.chunk_id), chunk.chunk_id in self.view.glue
        glue &= base is None and (
            self.policy.minimum == "exact" or not self.rows.has_canonical(chunk.chunk_id)
        )
        if not before.seats and base is None and not glue:
            has_canonical = self.rows.has_canonical(chunk.chunk_id) or chunk.chunk_id in self._new_ids
            source = self.view.canonical_source(chunk.chunk_id, lossy=self.view.lossy and has_canonical)
            return source if self.policy.admits(source.guarantee) else None
        state = before.footing
        own = chunk.source if isinstance(chunk, Seat) and not chunk.source.canonical else None
        if own and own.antecedents == before.lineage and own.guarantee == state == "exact":
            return own
        if glue:
            return None  # nothing of it is stored
        if self.policy.minimum != "exact":
            offer = self._best_patch(chunk, before, base)
            if offer is not None:
                return self.view.canonical_source(chunk.chunk_id, base=base).with_patch(
                    offer, _behind(offer, before)
                )
        # with a base there is no canonical to serve blind: computing one costs as much as the exact forward
        if base is None and (self.policy.admits("blind") or self.policy.on_miss == "blind"):
            return replace(self.view.canonical_source(chunk.chunk_id), guarantee="blind")
        return None

    def _reason(self, chunk: Newcomer | Seat, before: Seats) -> Reason:
        """Why no stored KV serves a chunk behind ``before``, by the rows that `best_source` looked at."""
        policy, rows = self.policy, self.rows
        if not policy.moves:
            return "policy"
        if chunk.chunk_id in self.view.glue:
            return "glue"
        base = self.base(chunk.chunk_id)
        anchor = "" if base is None else base.context.anchor
        if base is None and not rows.has_canonical(chunk.chunk_id):
            return "no canonical"
        antecedents = before.chunk_ids
        if rows.has_refused(chunk.chunk_id, antecedents, "exact", anchor):
            return "refused"
        return "no patch" if rows.patch(chunk.chunk_id, antecedents, "exact", anchor) is None else "budget"

    def _prefill(
        self,
        chunk: Newcomer | Seat,
        before: Seats,
        spot: Spot,
        new: bool = False,
        archived: bool = False,
        number: int | None = None,
        leading: Source | None = None,
        reason: Reason = "",
    ) -> Seat:
        """Plan a conditioned forward. Raises PolicyRefused if it is less than a minimum of "exact".

        ``leading``: the source of a canonical, which the forward behind the anchor alone makes.
        """
        state = before.footing
        guarantee = prefilled_behind(state)
        if self.policy.minimum == "exact" and guarantee != "exact":
            raise PolicyRefused(
                f"the window serves exact KV only, but holds {state} KV before this place: switch "
                "conditioning on (condition(slot, True)), or let it serve less (the policy's minimum)"
            )
        source = leading or Source(spot, before.lineage, guarantee, canonical=False, behind=before.tokens)
        number = number or new_number()
        seat = Seat(chunk.chunk_id, chunk.length, spot, source, guarantee, state, archived, number=number)
        heads, is_picture = self.heads.get(chunk.chunk_id, ()), chunk.chunk_id == self._wrapper[0]
        head = self._head_at(self._wrapper[1] if is_picture else heads, before, spot, is_picture)
        is_joined = head is None and self._shares_forward_behind(before)
        self.steps.append(Prefill(seat, before, new, () if head is None else (head,), is_joined, reason))
        return seat

    def _take(self, chunk: Newcomer, before: Seats, spot: Spot) -> Seat | None:
        """A text on the KV of texts that left in its place, unless it is stored."""
        step = self._take_over(chunk, before, spot)
        is_stored = self.rows.has_canonical(chunk.chunk_id) or chunk.chunk_id in self._new_ids
        if step is None or (is_stored and self.best_source(chunk, before) is not None):
            return None
        self.steps.append(step)
        return step.seat

    def _leads(self, chunk: Newcomer | Seat, before: Seats, spot: Spot, source: Source) -> bool:
        """True for a leading chunk that is prefilled in place: without a frame that is its canonical."""
        if self.policy.forms != "returning" or source.patch or before.seats or self.view.lossy:
            return False
        if chunk.chunk_id in self._new_ids or self.rows.has_canonical(chunk.chunk_id):
            return False
        heads = self.heads.get(chunk.chunk_id, ())
        head = self._head_at(heads, before, spot) if heads else None
        stored_tokens = next((n for other, n in heads if self.rows.has_canonical(other)), 0)
        return stored_tokens <= (0 if head is None else head.tokens)

    def _shares_forward_behind(self, before: Seats) -> bool:
        """True if the step before prefills the chunk right in front, so that both share a forward."""
        last = self.steps[-1] if self.steps and self.view.joins else None
        if not isinstance(last, Prefill) or not last.tokens:
            return False  # nothing runs for a chunk whose KV is all at hand
        return last.seat.number == before.seats[-1].number

    def _spend(self, seat: Seat) -> Seat:
        """A chunk whose KV is about to be replaced; the patch of its prefill is harvested first."""
        return self.archive(seat) if self.policy.forms == "always" else seat

    def _miss(self, seat: Seat) -> None:
        """A stored chunk was prefilled for want of a patch: form it, now or in the background."""
        forms_now = self.policy.forms == "always"
        if forms_now or self.policy.minimum != "exact":
            self._harvest(seat, later=not forms_now)

    def _harvest(self, seat: Seat, later: bool = False) -> None:
        """Store the patch of a chunk's prefill, unless a better one is stored."""
        if seat.source.canonical or seat.chunk_id in self.view.glue or not self._forms_patches:
            return  # nothing was prefilled, or nothing is kept of it
        antecedents, formed = seat.source.antecedents, seat.formed
        base_row = self.base(seat.chunk_id)
        base = "" if base_row is None else base_row.context.anchor
        stored_patches = (self._find(seat, names, base) for names in possible_names(antecedents))
        if worth_harvesting(stored_patches, antecedents, formed, leading=bool(base)):
            if later:
                self.late_steps.append(Harvest(seat.number, base, later=True))
                if not (base or self.rows.has_canonical(seat.chunk_id)):
                    self.late_seats[seat.chunk_id] = seat
                return  # it is not there yet for the rest of this plan
            # a patch is formed against the canonical, which is made if missing
            self.steps.append(Harvest(seat.number, base, 0 if base else self._compute(seat)))
            self._formed[seat.chunk_id, antecedents, base] = formed

    def base(self, chunk_id: str) -> ObjectInfo | None:
        """The canonical behind another anchor to which patches of this window are added.

        None if the window has one of its own, or serves exact KV only.
        """
        if self.policy.minimum == "exact" or chunk_id in self._new_ids or self.rows.has_canonical(chunk_id):
            return None
        return self.rows.base(chunk_id)

    def _compute(self, chunk: Newcomer | Seat) -> int:
        """Tokens that run for the canonical, if it is missing; from now on it counts as stored."""
        if chunk.chunk_id in self._new_ids or self.rows.has_canonical(chunk.chunk_id):
            return 0
        tokens = chunk.length - self._stored_head_tokens(chunk, self._new_ids)
        self._new_ids.add(chunk.chunk_id)
        return tokens

    def later_cost(self) -> Spent:
        """The cost of the canonicals left to background work: those of one form run in one forward."""
        canonical_ids = self._new_ids | self.view.pending
        seats = [seat for seat in self.late_seats.values() if seat.chunk_id not in canonical_ids]
        tokens = [s.length - self._stored_head_tokens(s, canonical_ids | self._first_ids) for s in seats]
        run_seats = [seat for seat, count in zip(seats, tokens, strict=True) if count]
        form, encoded = self.view.places.form, self.view.encoded
        groups = (
            by_form((form(encoded[s.chunk_id]), s.length, s) for s in run_seats)
            if run_seats[1:]
            else run_seats
        )
        followed = [seat.length for seat in self._followed]
        return Spent(len(groups) + len(followed), sum(tokens) + sum(followed))

    def _stored_head_tokens(self, chunk: Newcomer | Seat, canonical_ids: Collection[str]) -> int:
        """First tokens of a canonical that are taken over from another one, stored or made before it."""
        heads = () if self.view.lossy else self.heads.get(chunk.chunk_id, ())
        return next((n for other, n in heads if other in canonical_ids or self.rows.has_canonical(other)), 0)

    # -- patches -------------------------------------------------------------------------------

    def _best_patch(self, chunk: Newcomer | Seat, before: Seats, base: ObjectInfo | None) -> Offer | None:
        """The best patch for a chunk behind ``before``; with a ``base``, only of those added to it."""
        antecedents, anchor = before.chunk_ids, "" if base is None else base.context.anchor
        offer = self.patch_behind(chunk, before, anchor) if self.policy.admits("patched") else None
        if offer is not None or base is not None:
            return offer
        if self.policy.admits("orbit"):
            row = self._row(chunk, antecedents, "orbit")
            if row is not None:
                return replace(self._offer("orbit", row), antecedents=antecedents)
        limit = self.policy.max_divergence
        if limit is not None and self.policy.admits("near"):
            for distance, info in self.rows.near(chunk.chunk_id, before.chunk_ids, limit):
                row = self._row(chunk, info.antecedents, info.kind)
                if row is not None:
                    note = f"near: a patch of other antecedents, divergence {distance:.2f}"
                    return replace(self._offer("near", row), note=note)
        return None

    def patch_behind(self, chunk: Newcomer | Seat, before: Seats, anchor: str = "") -> Offer | None:
        """The patch for exactly the chunks ``before`` it, added to the canonical behind ``anchor``.

        First the one behind these chunks in their present order; then the one behind survivors of the same
        lineage, which is no worse than a forward now. None without one.
        """
        for names in dict.fromkeys((before.chunk_ids, before.lineage)):
            offer = self._patch_offer(chunk, names, anchor)
            if offer is None:
                continue
            if at_least(guarantee_named(offer.formed), weakest((before.footing, "patched"))):
                return offer
        return None

    def _patch_alone(self, chunk: Seat, predecessor: str) -> Offer | None:
        """The stored patch behind one chunk alone; None without one."""
        offer = self._patch_offer(chunk, (predecessor,), "")
        return None if offer is None else replace(offer, guarantee="near")

    def _patch_offer(self, chunk: Newcomer | Seat, antecedents: tuple[str, ...], anchor: str) -> Offer | None:
        """The patch stored, or to be stored, behind these antecedents."""
        note = anchor and f"base: the canonical behind another system prompt, {anchor[:12]}"
        patch = self._find(chunk, antecedents, anchor)
        if patch is None or not patch.serves:
            return None
        error, created = (None, None) if patch.row is None else (patch.row.error, patch.row.created)
        return Offer("patched", antecedents, "exact", patch.formed, note, anchor, error, created)

    def _row(
        self, chunk: Newcomer | Seat, antecedents: Sequence[str], kind: str, base: str = ""
    ) -> ObjectInfo | None:
        return self.rows.patch_within(chunk.chunk_id, chunk.length, antecedents, kind, self.policy, base)

    def _offer(self, guarantee: Guarantee, row: ObjectInfo) -> Offer:
        return Offer(guarantee, row.antecedents, row.kind, row.formed, error=row.error, created=row.created)

    def _find(self, chunk: Newcomer | Seat, antecedents: tuple[str, ...], base: str = "") -> Stored | None:
        """The patch for ``antecedents`` that is stored, or that the plan forms; None without one."""
        formed = self._formed.get((chunk.chunk_id, antecedents, base))
        if formed is not None and not self.rows.has_refused(chunk.chunk_id, antecedents, "exact", base):
            return Stored(formed, serves=True)
        row = self.rows.patch(chunk.chunk_id, antecedents, "exact", base)
        return stored_patch(row, self.policy.budget, chunk.length, self.policy.max_error)

    def _take_over(self, chunk: Newcomer, before: Seats, spot: Spot) -> Prefill | None:
        """A text at ``spot`` behind ``before`` on what it takes over of those that left, if it is served.

        Each part is a survivor or less, as a chunk that stays, and the rest of the text is conditioned on it.
        It is never harvested: what is taken over is no prefill behind its antecedents.
        None if as much has exact KV at hand, as `_head_at` finds it.
        """
        if not chunk.takes:
            return None
        window = self.before
        seats: Sequence[Seat] = window.seats if window.said is None else (*window.seats, window.said)
        heads: list[TextHead] = []
        guarantees: list[Guarantee] = ["survivor"]
        head_tokens, source = 0, None
        for index, tokens in chunk.takes:
            seat = seats[index]
            source = seat.source
            if source.patch or source.lossy or source.home.shape or spot.shape:
                return None
            offset = tuple(to + head_tokens - at for to, at in zip(spot.low, source.home.low, strict=True))
            heads.append(TextHead(seat.number, tokens, offset))
            guarantees.append(seat.staying(before).guarantee)
            head_tokens += tokens
        exact = self._head_at(chunk.heads, before, spot)
        if source is None or (exact is not None and exact.tokens >= head_tokens):
            return None
        guarantee = weakest(
            [*guarantees, *((prefilled_behind(before.footing),) if head_tokens < chunk.length else ())]
        )
        if not self.policy.keeps(guarantee):
            return None
        source = Source(spot, source.antecedents, guarantee, canonical=False, behind=source.behind)
        seat = Seat(chunk.chunk_id, chunk.length, spot, source, guarantee, "near", archived=False)
        return Prefill(seat, before, heads=tuple(heads), reason="edited")

    def _head_at(
        self, heads: tuple[tuple[str, int], ...], before: Seats, spot: Spot, is_picture: bool = False
    ) -> TextHead | None:
        """The head, of a chunk at ``spot`` behind ``before``, that the window holds exactly there, or None.

        Words in front of a picture stand in a row, whatever shape that has.
        What was said behind the window's chunks stands there whatever these are worth, until they change.
        """
        window, tokens, matches = self.before, dict(heads), list[TextHead]()
        answer = window.said
        if answer is not None and answer.chunk_id in tokens:
            is_home = answer.spot.low == spot.low and not (answer.spot.shape or spot.shape)
            if is_home and before.frame == window.frame and before.seats == window.seats:
                return TextHead(answer.number, tokens[answer.chunk_id])
        if before.footing != "exact":
            return None
        for seat in (seat for seat in window.seats if seat.chunk_id in tokens):
            source = seat.source
            is_home = source.antecedents == before.lineage and source.home.low == spot.low
            plain = source.guarantee == "exact" and not source.patch
            if is_home and plain and (is_picture or not (source.home.shape or spot.shape)):
                matches.append(TextHead(seat.number, tokens[seat.chunk_id]))
        return max(matches, key=attrgetter("tokens"), default=None)


def _behind(offer: Offer, before: Seats) -> int:
    """The tokens of an offer's antecedents; 0 if they are others than those before it."""
    return before.tokens if sorted(chunks_of(offer.antecedents)) == sorted(before.chunk_ids) else 0


Placing = Literal["free", "given"]
"""The order of assembled chunks: the one in which the least is run, or the one that is given."""

EXHAUSTIVE = 4
"""Number of chunks of which all orders are priced; of more the `BEAM` best beginnings of each length."""

BEAM = 4

Price = tuple[float, float]
"""Tokens that run, and forwards."""

Order = tuple[int, ...]


def fitting(lengths: Sequence[int], room: int | None) -> list[int]:
    """Indices of the chunks that stand: each, as given, that fits beside those before it in ``room`` tokens.

    Raises WindowFull if none does.
    """
    chosen, free = list[int](), room
    for index, length in enumerate(lengths):
        if free is None or length <= free:
            chosen.append(index)
            free = None if free is None else free - length
    if not chosen:
        raise WindowFull(
            f"none of {len(lengths)} chunks fits: the first has {lengths[0]} tokens, the window has room for "
            f"{room}: raise max_tokens, or cut them smaller"
        )
    return chosen


def cheapest_order(items: Sequence[Any], price: Callable[[Sequence[Any]], Price]) -> list[Any]:
    """``items`` in the order of the least price, of equal ones in that nearest to the order given.

    Up to `EXHAUSTIVE` items all orders are priced, of more the best `BEAM` beginnings of each length; the
    order that is given is among them, so it is never dearer than that.
    """
    given = tuple(range(len(items)))

    def rank(order: Order) -> tuple[Price, Order]:
        return price([items[i] for i in order]), order

    if len(items) <= EXHAUSTIVE:
        orders: list[Order] = [*permutations(given)]
    else:
        orders = [()]
        for _ in items:
            longer = [(*order, i) for order in orders for i in given if i not in order]
            orders = sorted(longer, key=rank)[:BEAM]
        orders.append(given)
    return [items[i] for i in min(orders, key=rank)]


def check_placing(chunks: Any, max_tokens: Any, order: Any) -> None:
    """Raise ValueError for arguments of `KameraWindow.assemble` that mean nothing."""
    if isinstance(chunks, str) or not isinstance(chunks, Sequence) or not chunks:
        raise ValueError("assemble takes a list of at least one chunk: contents, chunks, slots or ids")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens={quote(max_tokens)}: give a whole number from 1 on, or None")
    if order not in ("free", "given"):
        raise ValueError(f'order {quote(order)} is neither "free" nor "given"')
