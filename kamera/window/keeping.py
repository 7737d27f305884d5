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
    Owed,
    Worth,
    archive_later,
    later_of,
    patch_dropped,
)
from kamera.window.seats import Seat, Seats
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState
from kamera.window.steps import Archive, Harvest


class RowLied(Exception):
    """An object is missing or differs from its row. The row is refused by now: plan again."""


@dataclass
class Keeping:
    """The KV that a run of a plan has at hand by number of its seat, and the parts of it that are kept.

    ``copies`` and ``cleans`` are what chunks stand on and show, ``rows`` what their copies were computed
    behind, ``whose`` their content, and ``stood`` the seats before those that ran.
    """

    before: WindowState
    stage: Stage
    copies: dict[int, Copy] = field(init=False, default_factory=dict)
    cleans: dict[int, Copy] = field(init=False, default_factory=dict)
    unarchived: set[int] = field(init=False, default_factory=set)
    whose: dict[int, Facts] = field(init=False, default_factory=dict)
    rows: dict[int, Seat] = field(init=False, default_factory=dict)
    stood: dict[int, Seats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        said = () if self.before.said is None else (self.before.said,)
        for resident in (*self.before.residents, *said):
            number = resident.seat.number
            self.whose[number] = resident.facts
            self.copies[number] = resident.copy
            self.rows[number] = resident.seat
            if resident.clean is not None:
                self.cleans[number] = resident.clean

    @property
    def former(self) -> Former:
        """What forms and stores."""
        return self.stage.former

    def harvest(self, number: int, base: str) -> None:
        """Form and store the patch of a chunk's prefill. Raises RowLied if that is not possible."""
        if number in self.unarchived:
            return
        facts, sample = self.whose[number], self.rows[number].source.sample
        if not self.former.keep_patch(facts, self.copies[number], self._stood(number), base, sample):
            raise RowLied

    def hand_over(self, owed: Sequence[Archive | Harvest]) -> None:
        """Leave steps to later work: first all canonicals that they need, together."""
        leaving, needed, harvests = list[tuple[Facts, Copy | None]](), list[Facts](), list[Harvest]()
        for step in owed:
            facts = self.whose[step.number]
            if isinstance(step, Archive):
                leaving.append((facts, self._canonical(step.number)))
                continue
            harvests.append(step)
            if not (step.base or self.former.catalogue.has_canonical(facts.chunk_id)):
                needed.append(facts)
        archive_later(self.former, leaving, needed)
        for step in harvests:
            self._harvest_later(step.number, step.base)

    def _harvest_later(self, number: int, base: str) -> None:
        former, facts, copy = self.former, self.whose[number], self.copies[number]
        before, sample = self._stood(number), self.rows[number].source.sample

        def harvest() -> list[Owed]:
            with former.operation():
                return former.owed_patch(facts, copy, before, base, sample)

        holds = [*kv_tensors(copy.kv), *before.tensors]
        later_of(former.backbone).add(
            harvest, Worth.PATCH, holds, partial(patch_dropped, former, facts), reads=facts.reads
        )

    def _stood(self, number: int) -> Before:
        """What stands before a chunk: at its prefill in this operation, else before the operation."""
        there = self.stood.get(number)
        still = (0,) * len(self.before.frame)
        if there is not None:
            return self.stage.before(self.assembled(there), self.rows[number], still)
        at = next(i for i, r in enumerate(self.before.residents) if r.number == number)
        seat = self.before.residents[at].seat
        offset = seat.source.home.offset(seat.spot)
        assert offset is not None, "a plan seats no chunk where it cannot stand"
        front = replace(self.before, residents=self.before.residents[:at])
        return self.stage.before(front, seat, offset)

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

    def _canonical(self, number: int) -> Copy | None:
        """The copy of a chunk, if it is its canonical as the model computed it."""
        copy, source = self.copies[number], self.rows[number].source
        return copy if source.canonical and copy.patch is None and not copy.lossy else None

    def seated(self, seat: Seat, facts: Facts, copy: Copy) -> None:
        """Note that a chunk stands on ``copy``, and shows it."""
        number = seat.number
        self.whose[number], self.copies[number], self.rows[number] = facts, copy, seat
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
        state = WindowState(tuple(residents), seats.frame)
        if all(map(is_, seats.seats, [resident.seat for resident in residents])):
            state.__dict__["seats"] = seats.saying(None)  # what the plan knows of them is known
        return state
