"""What a run of a plan holds, and what of it is archived, harvested or left to later work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_

from kamera.errors import NonFiniteKV, NotRelocatable
from kamera.ops import kv_tensors
from kamera.patches import (
    Before,
    Copy,
    Facts,
    Former,
    Guarantee,
    Owed,
    Worth,
    archive_later,
    later_of,
    patch_dropped,
)
from kamera.window.seats import Seats
from kamera.window.slots import Resident
from kamera.window.stage import Stage
from kamera.window.state import WindowState
from kamera.window.steps import Archive, Harvest


class RowLied(Exception):
    """An object is missing or differs from its row. The row is refused by now: plan again."""


@dataclass
class Keeping:
    """The KV that a run of a plan has at hand by number of its seat, and the parts of it that are kept.

    ``copies`` and ``cleans`` are what chunks stand on and show, ``whose`` their content, ``formed`` the
    guarantee of what their copies were formed behind, and ``stood`` the seats before those that ran.
    """

    before: WindowState
    stage: Stage
    copies: dict[int, Copy] = field(init=False, default_factory=dict)
    cleans: dict[int, Copy] = field(init=False, default_factory=dict)
    unarchived: set[int] = field(init=False, default_factory=set)
    whose: dict[int, Facts] = field(init=False, default_factory=dict)
    formed: dict[int, Guarantee] = field(init=False, default_factory=dict)
    stood: dict[int, Seats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        said = () if self.before.said is None else (self.before.said,)
        for resident in (*self.before.residents, *said):
            number = resident.seat.number
            self.whose[number] = resident.facts
            self.copies[number] = resident.copy
            self.formed[number] = resident.seat.formed
            if resident.clean is not None:
                self.cleans[number] = resident.clean

    @property
    def former(self) -> Former:
        """What forms and stores."""
        return self.stage.former

    def harvest(self, number: int, base: str) -> None:
        """Form and store the patch of a chunk's prefill. Raises RowLied if that is not possible."""
        facts, copy, formed = self.whose[number], self.copies[number], self.formed[number]
        if number in self.unarchived:
            return
        if not self.former.keep_patch(facts, copy, formed, self._stood(number), base):
            raise RowLied

    def hand_over(self, owed: Sequence[Archive | Harvest]) -> None:
        """Leave steps to later work: first all canonicals that they need, together."""
        leaving, needed, harvests = list[tuple[Facts, Copy]](), list[Facts](), list[Harvest]()
        for step in owed:
            facts = self.whose[step.number]
            if isinstance(step, Archive):
                leaving.append((facts, self.copies[step.number]))
                continue
            harvests.append(step)
            if not (step.base or self.former.catalogue.has_canonical(facts.chunk_id)):
                needed.append(facts)
        archive_later(self.former, leaving, needed)
        for step in harvests:
            self._harvest_later(step.number, step.base)

    def _harvest_later(self, number: int, base: str) -> None:
        facts, copy, formed, before = (
            self.whose[number],
            self.copies[number],
            self.formed[number],
            self._stood(number),
        )
        former = self.former

        def harvest() -> list[Owed]:
            with former.operation():
                return former.owed_patch(facts, copy, formed, before, base)

        holds = [*kv_tensors(copy.kv), *before.tensors]
        later_of(former.backbone).add(
            harvest, Worth.PATCH, holds, partial(patch_dropped, former, facts), reads=facts.reads
        )

    def _stood(self, number: int) -> Before:
        """What stands before a chunk: at its prefill in this operation, else before the operation."""
        there = self.stood.get(number)
        still = (0,) * len(self.before.frame)
        if there is not None:
            return self.stage.before(self.assembled(there), still)
        at = next(i for i, r in enumerate(self.before.residents) if r.number == number)
        seat = self.before.residents[at].seat
        offset = seat.source.home.offset(seat.spot)
        assert offset is not None, "a plan seats no chunk where it cannot stand"
        return self.stage.before(replace(self.before, residents=self.before.residents[:at]), offset)

    def archive(self, number: int) -> None:
        """Store a chunk's canonical; one that cannot have any is `unarchived`."""
        facts = self.whose[number]
        try:
            self.former.canonical(facts)
        except (NotRelocatable, NonFiniteKV):
            # past a position limit, or not finite in float16, even alone: it can only be appended anew
            self.unarchived.add(number)
        if facts.chunk_id in self.former.losses.unkept:
            self.unarchived.add(number)  # it is offered again when it leaves

    def seated(self, number: int, facts: Facts, copy: Copy) -> None:
        """Note that a chunk stands on ``copy``, and shows it."""
        self.whose[number], self.copies[number] = facts, copy
        self.cleans.pop(number, None)

    def assembled(self, seats: Seats) -> WindowState:
        """The state of ``seats``, with their tensors."""
        residents, held = [], self.before.residents_by_number
        for seat in seats.seats:
            number = seat.number
            seat = replace(seat, archived=False) if number in self.unarchived else seat
            clean = None if seat.clean is None else self.cleans[number]
            old, copy = held.get(number), self.copies[number]
            if old is None or old.seat is not seat or old.copy is not copy or old.clean is not clean:
                facts = self.whose[number]
                facts = replace(facts, heads=()) if facts.heads else facts  # the others may leave
                old = Resident(facts, seat, copy, clean)
            residents.append(old)
        state = WindowState(tuple(residents), seats.shift, seats.frame)
        if all(map(is_, seats.seats, [resident.seat for resident in residents])):
            state.__dict__["seats"] = seats.saying(None)  # what the plan knows of them is known
        return state
