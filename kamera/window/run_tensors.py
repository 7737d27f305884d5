"""What a run of a plan holds, and what of it is archived, harvested or left to later work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
    keep_patch,
    later_of,
    owed_patch,
    patch_dropped,
)
from kamera.window.seats import Seat, Seats
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState
from kamera.window.steps import Archive, Harvest


class RowLied(Exception):
    """An object is missing or differs from its row. The row is refused by now: plan again."""


@dataclass
class RunTensors:
    """The KV that a run of a plan has at hand by number of its seat, and the parts of it that are kept.

    ``tensors`` are those of chunks, ``rows`` what their copies were computed behind, and ``stood`` the seats
    before those that ran.
    """

    before: WindowState
    stage: Stage
    unarchived: set[int] = field(init=False, default_factory=set)
    tensors: dict[int, Resident] = field(init=False)
    rows: dict[int, Seat] = field(init=False)
    stood: dict[int, Seats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = dict(self.before.tensors)
        self.rows = {seat.number: seat for seat in self.before.seats.seats}

    @property
    def former(self) -> Former:
        """What forms and stores."""
        return self.stage.former

    def harvest(self, number: int, base: str) -> None:
        """Form and store the patch of a chunk's prefill. Raises RowLied if that is not possible."""
        if number in self.unarchived:
            return
        kept, sample = self.tensors[number], self.rows[number].source.sample
        if not keep_patch(self.former, kept.facts, kept.copy, self._stood(number), base, sample):
            raise RowLied

    def hand_over(self, owed: Sequence[Archive | Harvest]) -> None:
        """Leave steps to later work: first all canonicals that they need, together."""
        leaving, needed, harvests = list[tuple[Facts, Copy | None]](), list[Facts](), list[Harvest]()
        for step in owed:
            facts = self.tensors[step.number].facts
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
        former, facts, copy = self.former, self.tensors[number].facts, self.tensors[number].copy
        before, sample = self._stood(number), self.rows[number].source.sample

        def harvest() -> list[Owed]:
            with former.operation():
                return owed_patch(former, facts, copy, before, base, sample)

        holds = [*kv_tensors(copy.kv), *before.tensors]
        later_of(former.backbone).add(
            harvest, Worth.PATCH, holds, partial(patch_dropped, former, facts), reads=facts.reads
        )

    def _stood(self, number: int) -> Before:
        """What stands before a chunk: at its prefill in this operation, else before the operation."""
        there = self.stood.get(number)
        still = (0,) * len(self.before.seats.frame)
        if there is not None:
            return self.stage.before(self.assembled(there), self.rows[number], still)
        seats = self.before.seats
        at = next(i for i, seat in enumerate(seats.seats) if seat.number == number)
        seat, front = seats.seats[at], Seats(seats.seats[:at], seats.frame)
        return self.stage.before(
            replace(self.before, seats=front), seat, seat.source.home.distance(seat.spot)
        )

    def archive(self, number: int) -> None:
        """Store a chunk's canonical; one that cannot have any is `unarchived`."""
        facts = self.tensors[number].facts
        try:
            self.former.canonical(facts)
        except (NotRelocatable, NonFiniteKV):
            # past a position limit, or not finite in float16, even alone: it can only be appended anew
            self.unarchived.add(number)
        if facts.chunk_id in self.former.losses.unkept:
            self.unarchived.add(number)  # it is offered again when it leaves

    def _canonical(self, number: int) -> Copy | None:
        """The copy of a chunk, if it is its canonical as the model computed it."""
        copy, source = self.tensors[number].copy, self.rows[number].source
        return copy if source.canonical and copy.patch is None and not copy.lossy else None

    def seated(self, seat: Seat, facts: Facts, copy: Copy) -> None:
        """Note that a chunk stands on ``copy``, and shows it."""
        self.tensors[seat.number], self.rows[seat.number] = Resident(facts, copy), seat

    def assembled(self, seats: Seats) -> WindowState:
        """The state of ``seats``, with their tensors."""
        if not self.unarchived.isdisjoint([seat.number for seat in seats.seats]):
            told = [
                replace(seat, archived=False) if seat.number in self.unarchived else seat
                for seat in seats.seats
            ]
            seats = Seats(tuple(told), seats.frame)
        kept = dict[int, Resident]()
        for seat in seats.seats:
            resident = self.tensors[seat.number]
            if resident.facts.heads:  # the others may leave
                resident = replace(resident, facts=replace(resident.facts, heads=()))
            if resident.clean is not None and seat.clean is None:
                resident = replace(resident, clean=None)
            kept[seat.number] = resident
        return WindowState(seats.saying(None), kept)
