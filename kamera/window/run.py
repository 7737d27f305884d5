"""Acts on a plan, and decides nothing: forwards run, patches are applied, objects stored, costs counted.

`Executor` holds what a window acts with. Questions run behind a state of the window and leave it as it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kamera.content import Chunk, Encoded, Spoken, as_messages, common_prefix
from kamera.engines import Continuation, Engine, LiveKV, Span, Work, Written
from kamera.errors import EmptyChunk, NonFiniteKV, NotRelocatable, quote
from kamera.ops import KV, NO_KV, kv_concat, kv_copy, kv_tensors, kv_tokens, relocate_kv, rotated_bytes
from kamera.patches import (
    Anchor,
    Before,
    Former,
    Losses,
    Owed,
    Priority,
    archive_later,
    background_of,
    follow_later,
    keep_patch,
    patch_dropped,
    patch_to_put,
    prefix_kv,
    text_positions,
)
from kamera.store import ChunkStore, ObjectInfo
from kamera.trust import ReusePolicy, prefilled_behind
from kamera.window.plan import (
    Archive,
    Clean,
    Follow,
    Harvest,
    Place,
    Plan,
    Prefill,
    Step,
    TextHead,
    View,
    plan,
    runs_of,
)
from kamera.window.requests import Arrange, NamedRequest
from kamera.window.slots import Resident, Seat, Seats, Slot, Source, Spots, WindowState, is_glue, shift


class Times(NamedTuple):
    """Seconds of an operation by part.

    ``plan``: contents become chunks, rows are looked up, the plan is made. ``encode``: new pictures go
    through the vision tower. ``run``: the plan's forwards, reads and puts. ``show``: the live KV is written.
    """

    plan: float = 0.0
    encode: float = 0.0
    run: float = 0.0
    show: float = 0.0


@dataclass(frozen=True, repr=False)
class Report:
    """One operation's outcome and cost.

    ``slot`` is the slot that arrived or left (the last of several; None after a reorder), ``slots`` the
    window's slots after it, ``evicted`` those that left. ``forwards``, ``tokens_recomputed`` (tokens run
    through the decoder) and ``vision_encodes`` are counted by hooks on the model, bytes where they are
    written. ``tokens_held`` are those of new texts whose KV stood where they need it: the beginning of an
    edited text, or what was said behind the window (`respond`). ``times`` are parts of
    ``seconds``; an answer's own time is in neither.
    ``notes`` name objects that were refused (a damaged patch, say) or not stored (on a full disk, say).
    """

    operation: str
    slot: Slot | None
    slots: tuple[Slot, ...]
    evicted: tuple[Slot, ...]
    forwards: int
    tokens_recomputed: int
    vision_encodes: int
    bytes_rotated: int
    bytes_patched: int
    seconds: float
    notes: tuple[str, ...] = ()
    tokens_held: int = 0
    times: Times = field(default_factory=Times)

    def __repr__(self) -> str:
        counts = {
            "forwards": self.forwards,
            "tokens recomputed": self.tokens_recomputed,
            "vision encodes": self.vision_encodes,
            "bytes rotated": self.bytes_rotated,
            "bytes patched": self.bytes_patched,
            "evicted": len(self.evicted),
            "notes": len(self.notes),
        }
        where = "" if self.slot is None else f" {self.slot.chunk_id[:12]} {self.slot.guarantee},"
        costs = "".join(f"{n} {name}, " for name, n in counts.items() if n)
        return f"Report({self.operation}:{where} {len(self.slots)} slots, {costs}{self.seconds:.4f} seconds)"


@dataclass(frozen=True, repr=False)
class SlotReport(Report):
    """The report of an operation on one chunk, or of a slide: there is always a ``slot``."""

    slot: Slot


@dataclass(eq=False)
class Tally:
    """Running counts of one operation."""

    forwards: int = 0
    tokens: int = 0
    tokens_held: int = 0
    vision_encodes: int = 0
    bytes_rotated: int = 0
    bytes_patched: int = 0
    seconds: float = 0.0
    end: float | None = None
    notes: list[str] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    _at: float = field(default_factory=time.perf_counter)

    def count_time(self, part: str) -> None:
        """Count the time since the last call, or since the beginning, to a part of `Times`."""
        now = time.perf_counter()
        end = now if self.end is None else min(self.end, now)
        self.times = self.times._replace(**{part: getattr(self.times, part) + max(0.0, end - self._at)})
        self._at = now

    def add(self, written: Written) -> None:
        """Count bytes that were written."""
        self.bytes_rotated += written.bytes_turned
        self.bytes_patched += written.bytes_patched

    def leave_out(self, work: Work, forwards: int, tokens: int, at: float) -> None:
        """Leave an answer's own work and time out of the operation's.

        Of its ``work``, ``forwards`` and ``tokens`` were the operation's, whose time ends ``at``.
        """
        self.forwards -= work.forwards - forwards
        self.tokens -= work.tokens - tokens
        self.end = at

    def report(
        self, operation: str, slot: Slot | None, slots: tuple[Slot, ...], evicted: tuple[Slot, ...] = ()
    ) -> Report:
        """The finished report."""
        counts = (self.forwards, self.tokens, self.vision_encodes, self.bytes_rotated, self.bytes_patched)
        rest = (slots, evicted, *counts, self.seconds, tuple(self.notes), self.tokens_held, self.times)
        return Report(operation, None, *rest) if slot is None else SlotReport(operation, slot, *rest)


@contextmanager
def count_operation(backbone: Engine) -> Iterator[Tally]:
    """Count one operation's model work and time into a tally."""
    tally = Tally()
    start = time.perf_counter()
    with backbone.measure() as work:
        yield tally
    tally.forwards += work.forwards
    tally.tokens += work.tokens
    tally.vision_encodes = work.vision_encodes
    tally.seconds = (tally.end or time.perf_counter()) - start


class TokenSequence(NamedTuple):
    """A window's whole sequence: token ids, int64 ``[tokens]``, and positions, int64 ``[axes, tokens]``."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor


Question = Spoken
"""Text, chat messages, or token ids ``[tokens]`` used as given."""

Inquiry = tuple[torch.Tensor, Mapping[str, Any]]
"""A question's token ids ``[tokens]``, and options of its answer."""


@dataclass(frozen=True)
class Executor:
    """What acts for a window: its former, its live cache, and the places of chunks.

    ``max_tokens`` bounds anchor and chunks.
    """

    former: Former
    live: LiveKV
    spots: Spots
    max_tokens: int | None = None

    @classmethod
    def of(
        cls,
        backbone: Engine,
        store: ChunkStore,
        anchor: Anchor,
        policy: ReusePolicy,
        losses: Losses,
        max_tokens: int | None,
    ) -> Executor:
        """That of a new window under ``policy``."""
        former = Former(
            backbone, store, anchor, policy.budget, background_of(backbone), losses, policy.max_error
        )
        return cls(former, backbone.live(holds=True), Spots(backbone, anchor), max_tokens)

    def plan(self, named: NamedRequest, state: WindowState, policy: ReusePolicy) -> Plan:
        """The plan of a request to a window in ``state``. Raises the refusals of the operation."""
        request, encoded = named.request, named.encoded(state)
        glue = frozenset[str]()
        if isinstance(request, Arrange) and not request.archive and policy.forms == "returning":
            glue = frozenset(chunk_id for chunk_id, chunk in encoded.items() if is_glue(chunk))
        return plan(request, self.view(state, encoded, policy, glue))

    def view(
        self,
        state: WindowState,
        encoded: Mapping[str, Encoded],
        policy: ReusePolicy,
        glue: frozenset[str] = frozenset(),
    ) -> View:
        """What a plan for ``state`` is made from; ``encoded`` and ``glue`` as in `View`."""
        former = self.former
        return View(
            state.seats,
            former.catalogue,
            policy,
            anchor=former.anchor.length,
            reach=former.backbone.limits,
            max_tokens=self.max_tokens,
            lossy=former.context.lossy,
            places=self.spots,
            encoded=encoded,
            joins=former.backbone.facts.joins,
            glue=glue,
            pending=frozenset(name for context, name in tuple(former.waiting) if context == former.context),
        )

    def run(
        self,
        named: NamedRequest,
        before: WindowState,
        policy: ReusePolicy,
        tally: Tally,
        plan: Plan | None = None,
        inquiry: Inquiry | None = None,
    ) -> tuple[Plan, WindowState, torch.Tensor | None]:
        """Run a request by its ``plan``, which is made here if none is given.

        Returns the plan that ran, the window after it, and the answer's tokens to an ``inquiry``. An unseen
        chunk is encoded only when the plan has shown that it can come. If an object is missing or differs
        from its row, which shows before any answer, the row is refused and the request planned again.
        ``before`` is not changed. Raises the errors of forwards and puts.
        """
        plan = plan or self.plan(named, before, policy)
        tally.count_time("plan")
        encoded = {**named.encoded(before), **named.encode(self.former.encodings)}
        tally.count_time("encode")
        while True:
            try:
                with self._reading_ahead(plan):
                    state, answer = _PlanRun(before, self, plan, encoded, tally, inquiry).run_steps()
                tally.count_time("run")
                return plan, state, answer
            except RowLied:
                plan = self.plan(named, before, policy)

    def _reading_ahead(self, plan: Plan) -> AbstractContextManager[None]:
        """Context in which what a plan reads comes from a remote at once, and while its forwards run."""
        former = self.former
        if not former.store.has_remote:
            return nullcontext()
        infos = [info for step in plan.steps for info in self._rows_of(step) if info is not None]
        return former.store.read_ahead(infos)

    def _rows_of(self, step: Step) -> list[ObjectInfo | None]:
        """The rows of what a step reads, as far as its plan has asked for them."""
        rows = self.former.catalogue
        if not isinstance(step, Place) or step.tokens:
            return []
        chunk_id, offer = step.seat.chunk_id, step.seat.source.patch
        if offer is None:
            return [rows.canonical(chunk_id)]
        canonical = rows.base(chunk_id) if offer.base else rows.canonical(chunk_id)
        return [canonical, rows.patch(chunk_id, offer.antecedents, offer.kind, offer.base)]

    def show(self, state: WindowState, tally: Tally | None = None) -> None:
        """Make the live cache show ``state``."""
        written = self.live.show(self.spans(state))
        if tally is not None:
            tally.add(written)

    def spans(self, state: WindowState) -> list[Span]:
        """The spans of the anchor and of the chunks of ``state``."""
        return [Span(self.former.anchor.kv, None, state.seats.frame), *state.spans]

    def before(self, state: WindowState, seat: Seat) -> Before:
        """What the chunk of a seat, which comes next, was prefilled behind."""
        return Before(seat.source.antecedents, seat.formed, tuple(self.spans(state)))

    # -- texts behind a window -----------------------------------------------------------------

    def sequence(
        self,
        state: WindowState,
        text: torch.Tensor,
        coming: Sequence[Encoded] = (),
        places: Sequence[torch.Tensor] = (),
    ) -> TokenSequence:
        """A window, chunks that come at ``places``, and a text behind them, where the live cache has them."""
        anchor, chunks = self.former.anchor, [*state.encoded, *coming]
        ids = [anchor.input_ids, *(c.input_ids for c in chunks), text]
        front = [shift(anchor.positions, state.seats.frame), *state.positions, *places]
        return TokenSequence(
            torch.cat(ids), torch.cat([*front, self.text_positions(state, text, coming)], dim=1)
        )

    def text_positions(
        self, state: WindowState, text: torch.Tensor, coming: Sequence[Encoded] = ()
    ) -> torch.Tensor:
        """Positions in the live cache of a text behind a window and chunks that come, ``[axes, tokens]``."""
        former = self.former
        places = text_positions(former.backbone, former.anchor.input_ids, [*state.encoded, *coming], text)
        return shift(places, state.seats.frame)

    def with_answer(self, state: WindowState, question: torch.Tensor, answer: Continuation) -> WindowState:
        """The window with a question and the first tokens of its answer behind its chunks."""
        if answer.tail is None:
            return state
        spoken = torch.cat([question, answer.tokens[0].to(question)])[: kv_tokens(answer.tail)]
        # places are remembered by id: one id for two lengths would give the second the first one's
        encoded = Encoded(spoken, chunk_id=f"said {len(spoken)}")
        positions, formed = self.text_positions(state, spoken), state.seats.footing
        source = Source(
            self.spots.spot(encoded, positions),
            state.seats.lineage,
            prefilled_behind(formed),
            canonical=False,
            behind=state.seats.tokens,
        )
        seat = Seat(encoded.chunk_id, encoded.num_tokens, source.home, source, source.guarantee, formed)
        return state.with_said(seat, Resident(encoded, Span.computed(answer.tail, positions)))

    # -- questions, whose additions to the live cache are discarded ----------------------------

    def question_ids(self, question: Question) -> torch.Tensor:
        """Token ids of a question; text and messages get the chat template's closing."""
        ids = self.former.backbone.builder.question_ids(question, self.former.anchor.tail)
        if ids.shape[0] == 0:
            raise EmptyChunk(f"question {quote(question)} has no tokens: ask something")
        return ids

    def logits_of(self, state: WindowState, questions: Sequence[Question]) -> torch.Tensor:
        """Logits ``[questions, vocabulary]`` of the first token of each answer; they share forwards."""
        ids = [self.question_ids(question) for question in questions]
        longest = max(ids, key=len)
        positions = self.text_positions(state, longest)
        self.show(state)
        return torch.cat(self.former.backbone.ask(ids, positions, self.live))

    def logits_of_answers(
        self, state: WindowState, asked: Sequence[tuple[Question, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Logits ``[tokens, vocabulary]`` from which each answer's tokens were, or would be, drawn."""
        pairs = [(self.question_ids(question), answer) for question, answer in asked]
        texts = [torch.cat([ids, answer.to(ids)])[:-1] for ids, answer in pairs]
        positions = self.text_positions(state, max(texts, key=len))
        self.show(state)
        every = self.former.backbone.ask(texts, positions, self.live, every=True)
        return [rows[-len(answer) :] for rows, (_, answer) in zip(every, pairs, strict=True)]

    def answer_ids(self, state: WindowState, question: Question, **options: Any) -> torch.Tensor:
        """New token ids, ``[sequences, new]``, as returned by the model's own ``generate``."""
        sequence = self.sequence(state, self.question_ids(question))
        self.show(state)
        return self.former.backbone.decode(*sequence, self.live, **options).tokens

    def exchange_chunk(self, question: Question, answer: torch.Tensor) -> Chunk:
        """Question and answer as one text chunk that leaves the user's turn open again."""
        backbone = self.former.backbone
        parts = [self.question_ids(question), answer]
        reopen = self.former.anchor.reopen
        is_spoken = isinstance(question, str) or as_messages(question) is not None
        if is_spoken and reopen:
            closing = backbone.builder.tokenize(reopen)
            # generate stops at the token that closes a turn, with which reopening begins
            if answer.shape[0] and int(answer[-1]) == int(closing[0]):
                closing = closing[1:]
            parts.append(closing)
        label = question if isinstance(question, str) else f"{len(parts[0])} question tokens"
        return backbone.chunk_from_tensors(torch.cat(parts), label=label[:80])


class RowLied(Exception):
    """An object is missing or differs from its row. The row is refused by now: plan again."""


@dataclass
class _PlanRun:
    """``tensors`` are those of chunks by the number of their seat, ``rows`` what these were computed behind.

    ``fronts`` are the seats before those that ran. Chunks that are ``unarchived`` cannot be archived.
    """

    before: WindowState
    executor: Executor
    plan: Plan
    encoded: Mapping[str, Encoded]
    tally: Tally
    inquiry: Inquiry | None = None
    answer: Continuation | None = None
    unarchived: set[int] = field(default_factory=set)
    former: Former = field(init=False)
    tensors: dict[int, Resident] = field(init=False)
    rows: dict[int, Seat] = field(init=False)
    fronts: dict[int, Seats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.former = self.executor.former
        self.tensors = dict(self.before.tensors)
        self.rows = {seat.number: seat for seat in self.before.seats.seats}

    def run_steps(self) -> tuple[WindowState, torch.Tensor | None]:
        """Run all steps; the window after them, and the answer's tokens."""
        last = None if self.inquiry is None else self.plan.tail_prefill
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
                    clean = self.former.canonical(resident.encoded)
                    self.tensors[number] = replace(resident, clean=clean)
        if late_steps:
            self.queue_later_steps(late_steps)
        self.tally.notes.extend(self.plan.notes)
        self.former.catalogue.has_departed |= bool(self.plan.left)
        if self.inquiry is None:
            return self.state_of(self.plan.after), None
        if self.answer is None:
            self._ask(self.state_of(self.plan.after), self.inquiry)
        assert self.answer is not None, "the question was asked"
        state = self.executor.with_answer(self.state_of(self.plan.after), self.inquiry[0], self.answer)
        return state, self.answer.tokens

    def _ran_at(self, step: Prefill, encoded: Encoded, span: Span) -> None:
        """Note that the chunk of a step has run, and stands on ``span``."""
        seat = step.seat
        self.put(seat, encoded, span)
        self.former.catalogue.note_miss(encoded.chunk_id)
        self.former.catalogue.prefilled.add((encoded.chunk_id, seat.source.antecedents))
        self.fronts[seat.number] = step.before
        if metrics := self.former.store.metrics:
            metrics.count_served(seat.guarantee, computed=True, new=step.new)

    def _place(self, step: Place) -> None:
        seat = step.seat
        encoded, source, patch = self.encoded[seat.chunk_id], seat.source, None
        offer = source.patch
        if offer is not None:
            patch = self.former.patch(encoded, offer.antecedents, offer.kind, offer.formed, offer.base)
            if patch is None:
                raise RowLied
            self.tally.notes += [offer.note] if offer.note else []
        is_leading = patch is None and source.guarantee != "blind"
        if offer is not None and offer.base:
            base_copy = self.former.base_copy(encoded, offer.base)
            if base_copy is None:
                raise RowLied
            canonical = base_copy
        else:
            canonical = self.former.canonical(encoded, leading=is_leading)
        self.put(seat, encoded, replace(canonical, patch=patch))
        if metrics := self.former.store.metrics:
            metrics.count_served(seat.guarantee, computed=False)

    def _prefill(self, run: Sequence[Prefill], inquiry: Inquiry | None) -> None:
        """Prefill chunks in one forward, and answer an ``inquiry``."""
        before = self.state_of(run[0].before)
        chunks = [self.encoded[step.seat.chunk_id] for step in run]
        places = [self.executor.spots.positions(c, s.seat.spot) for c, s in zip(chunks, run, strict=True)]
        spans = self.executor.spans(before)
        head, rest, rest_positions = self._begin(run[0], chunks[0], places[0], spans)
        running = [rest, *chunks[1:]]
        tokens = sum(e.num_tokens for e in running)
        kvs: tuple[KV, ...] = (NO_KV,)
        if inquiry is not None:
            kvs = self._ask(before, inquiry, chunks, places, spans, running)
        elif tokens:
            self.tally.add(self.executor.live.show(spans, room=tokens))
            kvs = self.former.backbone.prefill(running, [rest_positions, *places[1:]], self.executor.live)
        kvs = (self.executor.live.hold(_join(head, kvs[0])), *kvs[1:])
        for step, chunk, positions, kv in zip(run, chunks, places, kvs, strict=True):
            self._ran_at(step, chunk, Span.computed(kv, positions))

    def _ask(
        self,
        before: WindowState,
        inquiry: Inquiry,
        chunks: Sequence[Encoded] = (),
        places: Sequence[torch.Tensor] = (),
        spans: Sequence[Span] = (),
        running: Sequence[Encoded] = (),
    ) -> tuple[KV, ...]:
        """Answer behind chunks at ``places`` behind ``before``; returns the KV of those ``running``.

        A question that was asked behind just this before runs from where it differs.
        """
        live, engine, start = self.executor.live, self.former.backbone, time.perf_counter()
        ids, options = inquiry
        sequence = self.executor.sequence(before, ids, chunks, places)
        inputs = [e for e in running if e.num_tokens]
        tokens = sum(e.num_tokens for e in inputs)
        head = None if chunks else self._said_before(before, ids)
        spans = [*(spans or self.executor.spans(before))]
        spans += [] if head is None else [Span(head, None, (0,) * engine.axes)]
        self.tally.add(live.show(spans, room=tokens))
        with engine.measure() as work:
            answer = engine.decode(*sequence, live, inputs, **options)
        if head is not None:
            self.tally.tokens_held += kv_tokens(head)
            tail = None if answer.tail is None else kv_concat([head, answer.tail])
            answer = answer._replace(tail=tail)
        self.answer = answer
        self.tally.leave_out(work, answer.forwards, tokens, answer.first if inputs else start)
        return answer.kvs if len(inputs) == len(running) else (NO_KV, *answer.kvs)

    def _said_before(self, before: WindowState, question: torch.Tensor) -> KV | None:
        """KV of a question's first tokens, but the last, if they were said behind the same chunks."""
        said, old = self.before.said, self.before.seats
        if said is None or (before.seats.seats, before.seats.frame) != (old.seats, old.frame):
            return None
        ids = said.encoded.input_ids
        count = min(common_prefix(question.tolist(), ids.tolist()), len(question) - 1)
        positions = self.executor.text_positions(before, question)
        return (
            prefix_kv(question, positions, ids, said.span.positions, said.span.kv, count) if count else None
        )

    def _begin(
        self, step: Prefill, encoded: Encoded, positions: torch.Tensor, spans: list[Span]
    ) -> tuple[KV | None, Encoded, torch.Tensor]:
        """A chunk's head, which is added to ``spans``, and what runs behind it with its positions."""
        head = self._kv_of_heads(step.heads, encoded, positions) if step.heads else None
        rest = None if head is None else encoded.behind(kv_tokens(head))
        if head is None or rest is None:
            return None, encoded, positions
        head_tokens = kv_tokens(head)
        self.tally.tokens_held += head_tokens
        spans.append(Span(head, None, (0,) * self.former.backbone.axes))
        return head, rest, positions[:, head_tokens:]

    def _kv_of_heads(self, heads: Sequence[TextHead], encoded: Encoded, positions: torch.Tensor) -> KV | None:
        """KV of a text's first tokens, taken over from its ``heads``; None where it is another's."""
        parts, layout, count = list[KV](), self.former.backbone.layout, 0
        for head in heads:
            whose, span = self.tensors[head.number].encoded, self.tensors[head.number].span
            ids, head_positions = encoded.input_ids[count:], shift(span.positions, head.offset)
            part = prefix_kv(ids, positions[:, count:], whose.input_ids, head_positions, span.kv, head.tokens)
            if part is None:
                return None
            if any(head.offset):
                part = relocate_kv(part, layout, head.offset)
                self.tally.bytes_rotated += rotated_bytes(part, layout)
            parts.append(part)
            count += head.tokens
        return kv_concat(parts) if len(parts) > 1 else parts[0]

    # -- what is kept --------------------------------------------------------------------------

    def harvest(self, number: int, base: str) -> None:
        """Form and store the patch of a chunk's prefill. Raises RowLied if that is not possible."""
        if number in self.unarchived:
            return
        resident = self.tensors[number]
        if not keep_patch(self.former, resident.encoded, resident.span, self._before_of(number), base):
            raise RowLied

    def queue_later_steps(self, steps: Sequence[Archive | Harvest | Follow]) -> None:
        """Leave steps to background work: first all canonicals that they need, together."""
        archives, bases, harvests = list[tuple[Encoded, Span | None]](), list[Encoded](), list[Harvest]()
        for step in steps:
            encoded = self.tensors[step.number].encoded
            if isinstance(step, Follow):
                continue
            if isinstance(step, Archive):
                archives.append((encoded, self._canonical(step.number)))
                continue
            harvests.append(step)
            if not (step.base or self.former.catalogue.has_canonical(encoded.chunk_id)):
                bases.append(encoded)
        archive_later(self.former, archives, bases)
        for step in harvests:
            self._harvest_later(step.number, step.base)
        for step in steps:
            if isinstance(step, Follow):
                follow_later(
                    self.former, self.tensors[step.number].encoded, self.tensors[step.predecessor].encoded
                )

    def _harvest_later(self, number: int, base: str) -> None:
        former, encoded, span = self.former, self.tensors[number].encoded, self.tensors[number].span
        before = self._before_of(number)

        def harvest() -> list[Owed]:
            with former.operation():
                return patch_to_put(former, encoded, span, before, base)

        holds = [*kv_tensors(span.kv), *before.tensors]
        background_of(former.backbone).add(
            harvest, Priority.PATCH, holds, partial(patch_dropped, former, encoded), reads=encoded.reads
        )

    def _before_of(self, number: int) -> Before:
        """What stands before a chunk: at its prefill in this operation, else before the operation."""
        seats, seat, row = self.fronts.get(number), self.rows[number], self.before.seats
        if seats is None:
            at = next(i for i, each in enumerate(row.seats) if each.number == number)
            front = replace(self.before, seats=Seats(row.seats[:at], row.frame))
        else:
            front = self.state_of(seats)
        return self.executor.before(front, seat)

    def archive(self, number: int) -> None:
        """Store a chunk's canonical; one that cannot have any is `unarchived`."""
        encoded = self.tensors[number].encoded
        try:
            self.former.canonical(encoded)
        except (NotRelocatable, NonFiniteKV):
            # past a position limit, or not finite in float16, even alone: it can only be appended anew
            self.unarchived.add(number)
        if encoded.chunk_id in self.former.losses.unkept:
            self.unarchived.add(number)  # it is offered again when it leaves

    def _canonical(self, number: int) -> Span | None:
        """The KV of a chunk, if it is its canonical as the model computed it."""
        span, source = self.tensors[number].span, self.rows[number].source
        return span if source.canonical and span.patch is None and not span.lossy else None

    def put(self, seat: Seat, encoded: Encoded, span: Span) -> None:
        """Note that a chunk stands on ``span``, and shows it."""
        self.tensors[seat.number], self.rows[seat.number] = Resident(encoded, span), seat

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
            if resident.encoded.heads:  # the others may leave
                resident = replace(resident, encoded=replace(resident.encoded, heads=()))
            if resident.clean is not None and seat.clean is None:
                resident = replace(resident, clean=None)
            tensors[seat.number] = resident
        return WindowState(seats.with_said(None), tensors)


def _join(head: KV | None, rest: KV) -> KV:
    if head is None:
        return rest
    return kv_concat([head, rest]) if kv_tokens(rest) else kv_copy(head)
