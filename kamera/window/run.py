"""Acts on a plan, and decides nothing: forwards are run, patches applied, objects read and stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from kamera.content import Encoded
from kamera.engines import Continuation, Span
from kamera.errors import NonFiniteKV, NotRelocatable
from kamera.ops import KV, NO_KV, kv_concat, kv_copy, kv_tensors, kv_tokens
from kamera.patches import (
    Before,
    Copy,
    Facts,
    Former,
    Owed,
    Worth,
    archive_later,
    follow_later,
    keep_patch,
    later_of,
    patch_dropped,
    patch_to_put,
)
from kamera.trust import ReusePolicy
from kamera.window.asking import Inquiry, sequence_behind, state_with_answer, tail_prefill
from kamera.window.heads import kv_of_heads
from kamera.window.naming import NamedRequest
from kamera.window.report import Tally
from kamera.window.seats import Seat, Seats
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState
from kamera.window.steps import Archive, Clean, Follow, Harvest, Place, Plan, Prefill, runs_of


class Done(NamedTuple):
    """A plan that was run, the window after it, and the answer's tokens if a question was asked."""

    plan: Plan
    state: WindowState
    answer: torch.Tensor | None = None


def carry_out(
    named: NamedRequest,
    before: WindowState,
    stage: Stage,
    policy: ReusePolicy,
    tally: Tally,
    plan: Plan | None = None,
    inquiry: Inquiry | None = None,
) -> Done:
    """Run a request by its ``plan``, which is made here if none is given.

    An unseen chunk is encoded only when the plan has shown that it can come. If an object is missing or
    differs from its row, which shows before any answer, the row is refused and the request planned again.
    ``before`` is not changed. Raises the errors of forwards and puts.
    """
    plan = plan or stage.plan(named, before, policy)
    tally.count_time("plan")
    facts = {**named.facts(before), **named.encode(stage.former.encodings)}
    tally.count_time("encode")
    while True:
        try:
            outcome = _PlanRun(before, stage, plan, facts, tally, inquiry).run_steps()
            tally.count_time("run")
            return outcome
        except RowLied:
            plan = stage.plan(named, before, policy)


class RowLied(Exception):
    """An object is missing or differs from its row. The row is refused by now: plan again."""


@dataclass
class _PlanRun:
    """``tensors`` are those of chunks by the number of their seat, ``rows`` what these were computed behind.

    ``fronts`` are the seats before those that ran. Chunks that are ``unarchived`` cannot be archived.
    """

    before: WindowState
    stage: Stage
    plan: Plan
    facts: Mapping[str, Facts]
    tally: Tally
    inquiry: Inquiry | None = None
    answer: Continuation | None = None
    unarchived: set[int] = field(default_factory=set)
    tensors: dict[int, Resident] = field(init=False)
    rows: dict[int, Seat] = field(init=False)
    fronts: dict[int, Seats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = dict(self.before.tensors)
        self.rows = {seat.number: seat for seat in self.before.seats.seats}

    @property
    def former(self) -> Former:
        return self.stage.former

    def run_steps(self) -> Done:
        last = None if self.inquiry is None else tail_prefill(self.plan)
        late_steps: list[Archive | Harvest | Follow] = []
        self.tally.tokens_held = 0  # a run that met a wrong row before this one counts no more
        for group in runs_of(self.plan.steps):
            step, run_steps = group[0], [step for step in group if isinstance(step, Prefill)]
            for member in group:
                if isinstance(member, Place):
                    self._place(member)
            match step:
                case Prefill():
                    self._prefill(run_steps, self.inquiry if step is last else None)
                case Archive(later=True) | Harvest(later=True) | Follow():
                    late_steps.append(step)
                case Archive(number):
                    self.archive(number)
                case Harvest(number, base):
                    self.harvest(number, base)
                case Clean(number):
                    resident = self.tensors[number]
                    clean = self.former.canonical(resident.facts)
                    self.tensors[number] = replace(resident, clean=clean)
        if late_steps:
            self.queue_later_steps(late_steps)
        self.tally.notes.extend(self.plan.notes)
        self.former.catalogue.has_departed |= bool(self.plan.left)
        if self.inquiry is None:
            return Done(self.plan, self.state_of(self.plan.after))
        if self.answer is None:
            self._ask(self.state_of(self.plan.after), self.inquiry)
        assert self.answer is not None, "the question was asked"
        state, tokens = self.state_of(self.plan.after), self.answer.tokens
        return Done(self.plan, state_with_answer(self.stage, state, self.inquiry.ids, self.answer), tokens)

    def _ran_at(self, step: Prefill, facts: Facts, copy: Copy) -> None:
        """Note that the chunk of a step has run, and stands on ``copy``."""
        seat = step.seat
        self.put(seat, facts, copy)
        self.former.catalogue.note_miss(facts.chunk_id)
        self.former.catalogue.prefilled.add((facts.chunk_id, seat.source.antecedents))
        self.fronts[seat.number] = step.before
        self.former.store.metrics.count_served(seat.guarantee, computed=True, new=step.new)

    def _place(self, step: Place) -> None:
        seat = step.seat
        facts, source, patch = self.facts[seat.chunk_id], seat.source, None
        offer = source.patch
        if offer is not None:
            patch = self.former.patch(facts, offer.antecedents, offer.kind, offer.formed, offer.base)
            if patch is None:
                raise RowLied
            self.tally.notes += [offer.note] if offer.note else []
        is_leading = patch is None and source.guarantee != "blind"
        if offer is not None and offer.base:
            base_copy = self.former.base_copy(facts, offer.base)
            if base_copy is None:
                raise RowLied
            canonical = base_copy
        else:
            canonical = self.former.canonical(facts, leading=is_leading)
        self.put(seat, facts, replace(canonical, patch=patch))
        self.former.store.metrics.count_served(seat.guarantee, computed=False)

    def _prefill(self, run: Sequence[Prefill], inquiry: Inquiry | None) -> None:
        """Prefill chunks in one forward, and answer an ``inquiry``."""
        before = self.state_of(run[0].before)
        facts = [self.facts[step.seat.chunk_id] for step in run]
        places = [self.stage.spots.positions(f, s.seat.spot) for f, s in zip(facts, run, strict=True)]
        spans = self.stage.spans(before)
        head, rest, rest_positions = self._begin(run[0], facts[0], places[0], spans)
        encoded = [rest, *[f.encoded for f in facts[1:]]]
        tokens = sum(e.num_tokens for e in encoded)
        kvs: tuple[KV, ...] = (NO_KV,)
        if inquiry is not None:
            kvs = self._ask(before, inquiry, facts, places, spans, encoded)
        elif tokens:
            self.tally.add(self.stage.live.show(spans, room=tokens))
            kvs = self.former.backbone.prefill(encoded, [rest_positions, *places[1:]], self.stage.live)
        kvs = (self.stage.live.hold(_join(head, kvs[0])), *kvs[1:])
        for step, fact, positions, kv in zip(run, facts, places, kvs, strict=True):
            self._ran_at(step, fact, Copy(kv, positions))

    def _ask(
        self,
        before: WindowState,
        inquiry: Inquiry,
        facts: Sequence[Facts] = (),
        places: Sequence[torch.Tensor] = (),
        spans: Sequence[Span] = (),
        encoded: Sequence[Encoded] = (),
    ) -> tuple[KV, ...]:
        """Answer behind chunks at ``places`` behind ``before``; returns the KV of their spans ``encoded``."""
        live, engine, start = self.stage.live, self.former.backbone, time.perf_counter()
        sequence = sequence_behind(self.stage, before, inquiry.ids, facts, places)
        inputs = [e for e in encoded if e.num_tokens]
        tokens = sum(e.num_tokens for e in inputs)
        self.tally.add(live.show(spans or self.stage.spans(before), room=tokens))
        with engine.measure() as work:
            answer = engine.decode(*sequence, live, inputs, **inquiry.options)
        self.answer = answer
        self.tally.leave_out(work, answer.forwards, tokens, answer.first if inputs else start)
        return answer.kvs if len(inputs) == len(encoded) else (NO_KV, *answer.kvs)

    def _begin(
        self, step: Prefill, facts: Facts, positions: torch.Tensor, spans: list[Span]
    ) -> tuple[KV | None, Encoded, torch.Tensor]:
        """A chunk's head, which is added to ``spans``, and what runs behind it with its positions."""
        head = None
        if step.heads:
            head, byte_counts = kv_of_heads(
                step.heads, self.tensors, facts, positions, self.former.backbone.layout
            )
            self.tally.add(byte_counts)
        if head is None:
            return None, facts.encoded, positions
        head_tokens = kv_tokens(head)
        self.tally.tokens_held += head_tokens
        spans.append(Span(head, None, (0,) * self.former.backbone.axes))
        return head, Encoded(facts.encoded.input_ids[head_tokens:], {}, {}), positions[:, head_tokens:]

    # -- what is kept --------------------------------------------------------------------------

    def harvest(self, number: int, base: str) -> None:
        """Form and store the patch of a chunk's prefill. Raises RowLied if that is not possible."""
        if number in self.unarchived:
            return
        resident = self.tensors[number]
        if not keep_patch(self.former, resident.facts, resident.copy, self._before_of(number), base):
            raise RowLied

    def queue_later_steps(self, steps: Sequence[Archive | Harvest | Follow]) -> None:
        """Leave steps to later work: first all canonicals that they need, together."""
        archives, bases, harvests = list[tuple[Facts, Copy | None]](), list[Facts](), list[Harvest]()
        for step in steps:
            facts = self.tensors[step.number].facts
            if isinstance(step, Follow):
                continue
            if isinstance(step, Archive):
                archives.append((facts, self._canonical(step.number)))
                continue
            harvests.append(step)
            if not (step.base or self.former.catalogue.has_canonical(facts.chunk_id)):
                bases.append(facts)
        archive_later(self.former, archives, bases)
        for step in harvests:
            self._harvest_later(step.number, step.base)
        for step in steps:
            if isinstance(step, Follow):
                follow_later(
                    self.former, self.tensors[step.number].facts, self.tensors[step.predecessor].facts
                )

    def _harvest_later(self, number: int, base: str) -> None:
        former, facts, copy = self.former, self.tensors[number].facts, self.tensors[number].copy
        before = self._before_of(number)

        def harvest() -> list[Owed]:
            with former.operation():
                return patch_to_put(former, facts, copy, before, base)

        holds = [*kv_tensors(copy.kv), *before.tensors]
        later_of(former.backbone).add(
            harvest, Worth.PATCH, holds, partial(patch_dropped, former, facts), reads=facts.reads
        )

    def _before_of(self, number: int) -> Before:
        """What stands before a chunk: at its prefill in this operation, else before the operation."""
        seats, seat, row = self.fronts.get(number), self.rows[number], self.before.seats
        if seats is None:
            at = next(i for i, each in enumerate(row.seats) if each.number == number)
            front = replace(self.before, seats=Seats(row.seats[:at], row.frame))
        else:
            front = self.state_of(seats)
        return self.stage.before(front, seat)

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

    def put(self, seat: Seat, facts: Facts, copy: Copy) -> None:
        """Note that a chunk stands on ``copy``, and shows it."""
        self.tensors[seat.number], self.rows[seat.number] = Resident(facts, copy), seat

    def state_of(self, seats: Seats) -> WindowState:
        """The state of ``seats``, with their tensors."""
        if not self.unarchived.isdisjoint([seat.number for seat in seats.seats]):
            row = [
                replace(seat, archived=False) if seat.number in self.unarchived else seat
                for seat in seats.seats
            ]
            seats = Seats(tuple(row), seats.frame)
        tensors = dict[int, Resident]()
        for seat in seats.seats:
            resident = self.tensors[seat.number]
            if resident.facts.heads:  # the others may leave
                resident = replace(resident, facts=replace(resident.facts, heads=()))
            if resident.clean is not None and seat.clean is None:
                resident = replace(resident, clean=None)
            tensors[seat.number] = resident
        return WindowState(seats.with_said(None), tensors)


def _join(head: KV | None, rest: KV) -> KV:
    if head is None:
        return rest
    return kv_concat([head, rest]) if kv_tokens(rest) else kv_copy(head)
