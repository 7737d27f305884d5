"""Acts on a plan, and decides nothing: forwards are run, patches applied, objects read and stored."""

from __future__ import annotations

import copy as copies
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from kamera.content import Encoded
from kamera.engines import Continuation, Sampling, Span, Written
from kamera.ops import (
    KV,
    NO_KV,
    kv_concat,
    kv_copy,
    kv_tokens,
    relocate_kv,
    rotated_bytes,
)
from kamera.patches import Copy, Facts, head_of, text_positions
from kamera.trust import ReusePolicy, prefilled_behind
from kamera.window.asking import Inquiry, last_run
from kamera.window.naming import NamedRequest
from kamera.window.report import Tally
from kamera.window.run_tensors import RowLied, RunTensors
from kamera.window.sampling import design_of
from kamera.window.seats import Seat, Source, footing
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState, moved, span_of
from kamera.window.steps import (
    Archive,
    Clean,
    Harvest,
    Place,
    Plan,
    Prefill,
    Sample,
    Step,
    TextHead,
    sample_group,
)


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
    tally.passed("plan")
    facts = {**named.facts(before), **named.encoded(stage.former.encodings)}
    tally.passed("encode")
    while True:
        try:
            done = _PlanRun(before, stage, plan, facts, tally, inquiry).done()
            tally.passed("run")
            return done
        except RowLied:
            plan = stage.plan(named, before, policy)


@dataclass
class _PlanRun(RunTensors):
    plan: Plan
    facts: Mapping[str, Facts]
    tally: Tally
    inquiry: Inquiry | None = None
    answer: Continuation | None = None
    placed: set[int] = field(default_factory=set)

    def done(self) -> Done:
        last = None if self.inquiry is None else last_run(self.plan)
        owed: list[Archive | Harvest] = []
        self.tally.held = 0  # a run that met a wrong row before this one counts no more
        steps = self.plan.steps
        for i, step in enumerate(steps):
            starts = isinstance(step, Prefill | Sample) and not step.joined
            if starts and (group := sample_group(steps, i)):
                self._sample(group, steps[i : steps.index(group[-1])])
                continue
            match step:
                case Place():
                    self._place(step)
                case Prefill(joined=True) | Sample():
                    pass  # it ran with the step before
                case Prefill():
                    self._prefill(step, self.inquiry if step is last else None)
                case Archive(later=True) | Harvest(later=True):
                    owed.append(step)
                case Archive(number):
                    self.archive(number)
                case Harvest(number, base):
                    self.harvest(number, base)
                case Clean(number):
                    kept = self.tensors[number]
                    clean = _anew(self.former.canonical(kept.facts))
                    self.tensors[number] = replace(kept, clean=clean)
        if owed:
            self.hand_over(owed)
        self.tally.notes.extend(self.plan.notes)
        if self.inquiry is None:
            return Done(self.plan, self.assembled(self.plan.after))
        if self.answer is None:
            self._ask(self.assembled(self.plan.after), self.inquiry)
        return self._answered(self.inquiry)

    def _sample(self, group: Sequence[Prefill | Sample], between: Sequence[Step]) -> None:
        """Run some tokens of chunks, and all of others, in one forward; ``between``, chunks are placed."""
        for placed in between:
            if isinstance(placed, Place):
                self._place(placed)
        last, running = group[-1], {step.seat.number: step for step in group}
        spans = [Span(self.former.anchor.kv, None, last.before.frame)]
        parts: list[Sampling] = []
        heads: dict[int, KV | None] = {}
        for seat in (*last.before.seats, last.seat):
            step, facts = running.get(seat.number), self.facts[seat.chunk_id]
            if step is None:
                spans.append(span_of(seat, self.tensors[seat.number]))
                continue
            positions = self.stage.spots.positions(facts, seat.spot)
            if isinstance(step, Prefill):
                heads[seat.number], encoded, positions = self._begun(step, facts, positions, spans)
                if encoded.num_tokens:
                    parts.append(Sampling(encoded, positions, len(spans)))
            else:
                base = self.tensors[seat.number].copy if step.own else self.former.canonical(facts)
                design = design_of(self.former, facts.chunk_id, base, step.base.canonical)
                completion = design.completion(step.size.tokens, positions)
                parts.append(Sampling(facts.encoded, positions, len(spans), completion))
                spans.append(Span(base.kv, base.patch, step.base.home.distance(seat.spot)))
        live, engine = self.stage.live, self.former.backbone
        self.tally.add(live.show(spans))
        made = iter(engine.sample(parts, live))
        for step in group:
            seat, facts = step.seat, self.facts[step.seat.chunk_id]
            head = heads.get(seat.number)
            rest = NO_KV if head is not None and kv_tokens(head) == seat.length else next(made)
            positions = self.stage.spots.positions(facts, seat.spot)
            self._ran_at(step, facts, Copy(_joined(head, rest), positions))

    def _ran_at(self, step: Prefill | Sample, facts: Facts, copy: Copy) -> None:
        """Note that the chunk of a step has run, and stands on ``copy``."""
        seat = step.seat
        self.seated(seat, facts, copy)
        self.former.catalogue.record_prefill(facts.chunk_id, seat.source.antecedents)
        self.stood[seat.number] = step.before
        new = isinstance(step, Prefill) and step.new
        self.former.store.metrics.served(seat.guarantee, computed=True, new=new)

    def _place(self, step: Place) -> None:
        seat = step.seat
        if seat.number in self.placed:
            return  # a sample behind it ran first
        self.placed.add(seat.number)
        facts, source, patch = self.facts[seat.chunk_id], seat.source, None
        offer = source.patch
        if offer is not None:
            patch = self.former.patch(
                facts, offer.antecedents, offer.kind, offer.formed, offer.base, offer.proof
            )
            if patch is None:
                raise RowLied
            self.tally.notes += [offer.note] if offer.note else []
        leading = patch is None and source.guarantee != "blind"
        if offer is not None and offer.base:
            based = self.former.base_copy(facts, offer.base)
            if based is None:
                raise RowLied
            canonical = based
        else:
            canonical = self.former.leading(facts) if leading else self.former.canonical(facts)
        self.seated(seat, facts, replace(_anew(canonical), patch=patch))
        self.former.store.metrics.served(seat.guarantee, computed=False)

    def _prefill(self, first: Prefill, inquiry: Inquiry | None) -> None:
        """Prefill a chunk, in the same forward those that are joined to it, and answer an ``inquiry``."""
        run = [first, *self._joined_to(first)]
        before = self.assembled(first.before)
        facts = [self.facts[step.seat.chunk_id] for step in run]
        places = [self.stage.spots.positions(f, s.seat.spot) for f, s in zip(facts, run, strict=True)]
        spans = self.stage.spans(before)
        head, rest, there = self._begun(first, facts[0], places[0], spans)
        encoded = [rest, *[f.encoded for f in facts[1:]]]
        if inquiry is not None:
            kvs = self._ask(before, inquiry, facts, places, spans, encoded)
        else:
            kvs = self._ran(spans, encoded, [there, *places[1:]])
        kvs = (_joined(head, kvs[0]), *kvs[1:])
        for step, fact, positions, kv in zip(run, facts, places, kvs, strict=True):
            self._ran_at(step, fact, Copy(kv, positions))

    def _ran(
        self, spans: Sequence[Span], encoded: Sequence[Encoded], places: Sequence[torch.Tensor]
    ) -> tuple[KV, ...]:
        """KV of chunks at ``places`` behind ``spans``; no forward for a chunk of which nothing is left."""
        live, engine = self.stage.live, self.former.backbone
        tokens = sum(e.num_tokens for e in encoded)
        if not tokens:
            return (NO_KV,)
        self.tally.add(live.show(spans, room=tokens))
        return engine.prefill_run(encoded, places, live)

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
        live, engine, asked = self.stage.live, self.former.backbone, time.perf_counter()
        anchor, chunks = self.former.anchor, [*before.facts, *facts]
        question = text_positions(engine, anchor.input_ids, chunks, inquiry.ids)
        ids = torch.cat([anchor.input_ids, *(f.encoded.input_ids for f in chunks), inquiry.ids])
        front, back = (moved(p, before.seats.frame) for p in (anchor.positions, question))
        positions = torch.cat([front, *before.positions, *places, back], dim=1)
        coming = [e for e in encoded if e.num_tokens]
        room = inquiry.room + sum(e.num_tokens for e in coming)
        self.tally.add(live.show(spans or self.stage.spans(before), room=room))
        with engine.measure() as work:
            answer = engine.decode(ids, positions, live, coming, **inquiry.options)
        self.answer = answer
        self.tally.answered(work, answer.forwards, room - inquiry.room, answer.first if coming else asked)
        return answer.kvs if len(coming) == len(encoded) else (NO_KV, *answer.kvs)

    def _answered(self, inquiry: Inquiry) -> Done:
        """The window after the plan, with the question and the answer's first tokens behind its chunks."""
        assert self.answer is not None, "the question was asked"
        state, answer = self.assembled(self.plan.after), self.answer
        if answer.tail is None:
            return Done(self.plan, state, answer.tokens)
        spoken = torch.cat([inquiry.ids, answer.tokens[0].to(inquiry.ids)])[: kv_tokens(answer.tail)]
        # places are remembered by id: one id for two lengths would give the second the first one's
        facts = Facts(f"said {len(spoken)}", Encoded(spoken, {}, {}), "")
        places = text_positions(self.former.backbone, self.former.anchor.input_ids, state.facts, spoken)
        positions, worth = moved(places, state.seats.frame), footing(state.seats)
        spot = self.stage.spots.spot(facts, positions)
        source = Source(spot, state.seats.lineage, prefilled_behind(worth), canonical=False)
        seat = Seat(facts.chunk_id, facts.length, spot, source, source.guarantee, worth)
        said = Resident(facts, Copy(answer.tail, positions))
        return Done(self.plan, state.saying(seat, said), answer.tokens)

    def _joined_to(self, first: Prefill) -> list[Prefill]:
        """The steps behind ``first`` that share its forward."""
        joined: list[Prefill] = []
        for step in self.plan.steps[self.plan.steps.index(first) + 1 :]:
            if not (isinstance(step, Prefill) and step.joined):
                break
            joined.append(step)
        return joined

    def _begun(
        self, step: Prefill, facts: Facts, positions: torch.Tensor, spans: list[Span]
    ) -> tuple[KV | None, Encoded, torch.Tensor]:
        """A chunk's head, which is added to ``spans``, and what runs behind it with its positions."""
        head = self._head(facts, positions, step.heads)
        if head is None:
            return None, facts.encoded, positions
        done = kv_tokens(head)
        self.tally.held += done
        spans.append(Span(head, None, (0,) * self.former.backbone.axes))
        return head, Encoded(facts.encoded.input_ids[done:], {}, {}), positions[:, done:]

    def _head(self, facts: Facts, positions: torch.Tensor, heads: Sequence[TextHead]) -> KV | None:
        """KV of a chunk's first tokens, taken over from its ``heads``; None without one."""
        found: list[KV] = []
        layout, done = self.former.backbone.layout, 0
        for head in heads:
            whose, copy = self.tensors[head.number].facts.encoded, self.tensors[head.number].copy
            offset = head.offset
            ids, there = facts.encoded.input_ids[done:], moved(copy.positions, offset)
            part = head_of(ids, positions[:, done:], whose.input_ids, there, copy.kv, head.tokens)
            if part is None:
                return None
            if any(offset):
                part = relocate_kv(part, layout, offset)
                self.tally.add(Written(bytes_turned=rotated_bytes(part, layout)))
            found.append(part)
            done += head.tokens
        return kv_concat(found) if len(found) > 1 else found[0] if found else None


def _joined(head: KV | None, rest: KV) -> KV:
    if head is None:
        return rest
    return kv_concat([head, rest]) if kv_tokens(rest) else kv_copy(head)


def _anew(copy: Copy) -> Copy:
    """The same tensors as another object: a plan counts a copy that is placed again as another source."""
    return replace(copy, kv=copies.copy(copy.kv))
