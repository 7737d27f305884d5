"""`KameraWindow`: a context window that is a deque. Every operation is a cache edit."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, overload

import torch

from kamera import forks
from kamera.content import Chunk, Content, Spoken
from kamera.engines import Account, HasEngine, engine_of
from kamera.errors import PolicyRefused, WindowFull, quote
from kamera.files import user_path
from kamera.patches import MOST_NEIGHBOURS, Losses, form_orders, later_of, prefill_anchor
from kamera.store import ChunkStore, Hit, check_store
from kamera.trust import ArchiveRule, OnLeave, ReusePolicy, policy_of
from kamera.window import requests
from kamera.window.anticipating import anticipate_by_itself, fits, prepare_departure
from kamera.window.asking import Asker, Inquiry, Question
from kamera.window.audit import queue_audits, slots_to_audit
from kamera.window.contents import Contents, one_at_a_time
from kamera.window.lookalikes import candidates, check_cosine, most_alike, whole_chunk_id
from kamera.window.naming import NamedRequest
from kamera.window.persist import load_window, save_window
from kamera.window.placement import (
    Placing,
    Price,
    cheapest_order,
    check_placing,
    fitting,
)
from kamera.window.report import Report, SlotReport, Tally
from kamera.window.requests import MIN_SCORE, Append, Lookalike, Recall, Request, Without
from kamera.window.run import Done, carry_out
from kamera.window.stage import stage_of
from kamera.window.state import Slot, WindowState
from kamera.window.steps import Cost, Plan

Ids = torch.Tensor | Sequence[int]
"""Token ids ``[tokens]``."""

Words = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, or chat messages."""

One = Literal[1]


class KameraWindow(Contents):
    """The deque of chunks in front of a question.

    ``system`` is the system prompt (text, messages, token ids, or None for the template's own);
    ``max_tokens`` bounds anchor and chunks together: `append` and `recall` slide by themselves if a chunk
    would not fit. ``on_leave`` says what becomes of the chunks that stay then
    (default: the policy's, `ReusePolicy.on_leave`).

    ``trace`` is a file to which the event of each operation is written, without content (`Trace`); `kamera
    plan` makes a plan from it, `kamera view` a page.

    An operation succeeds whole or leaves the window as it was. Operations and questions of several threads on
    one window run one after another; different windows and forks, although they share KV, run concurrently.
    """

    _turn: int = 0  # questions so far

    def __init__(
        self,
        backbone: HasEngine,
        store: ChunkStore,
        system: Spoken | None = None,
        *,
        max_tokens: int | None = None,
        policy: ReusePolicy | None = None,
        on_leave: OnLeave | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        check_store(store)
        engine, losses = engine_of(backbone), Losses()
        self._begin(trace)
        self._policy = policy_of(policy, on_leave)
        with self._account.count_now(engine):
            anchor = prefill_anchor(engine, system, store, losses, later=True)
            if max_tokens is not None and anchor.length >= max_tokens:
                raise WindowFull(
                    f"max_tokens={max_tokens} leaves no room behind the system prompt's {anchor.length} "
                    "tokens: raise it"
                )
            self._stage = stage_of(engine, store, anchor, self._policy, losses, max_tokens)
        self._state = WindowState.empty(engine.axes)

    # -- operations ----------------------------------------------------------------------------

    @one_at_a_time
    def append(self, content: Content | Chunk, *, archive: ArchiveRule | None = None) -> SlotReport:
        """Put a chunk at the tail; slide first if it would not fit.

        A chunk that is new to the store is encoded and prefilled in context, by one forward, and nothing else
        is formed. ``archive="now"`` archives its canonical with one more forward and harvests its patch,
        "later" puts that off until it leaves; None: as `ReusePolicy.forms` says. A stored chunk is handled as
        by `recall`. Raises WindowFull for a chunk larger than the window, IncompatibleChunk for one of
        another backbone, and the errors of `Backbone.chunk`.
        """
        return self._perform_on_slot(Append(content, archive))

    @one_at_a_time
    def recall(
        self,
        chunk_id: str | Slot | Chunk | None = None,
        *,
        like: Content | Chunk | None = None,
        min_score: float = MIN_SCORE,
        move: bool = False,
    ) -> SlotReport:
        """Bring an archived chunk to the tail: no vision encode, no forward if a patch is stored.

        ``chunk_id`` is its id or the beginning of it (AmbiguousId if another begins so), a slot that holds or
        held it, or the chunk itself. A chunk that is in view stays in place, and the notes say so;
        ``move=True`` brings it to the tail, as `evict` and a recall do.
        ``like`` (a picture) selects, for one vision encode, the chunk outside the window that looks most like
        it, if its cosine is at least ``min_score``. Raises UnknownChunk, IncompatibleChunk or CorruptChunk if
        the chunk is not available, StoreError if the store cannot be read.
        """
        if (chunk_id is None) == (like is None):
            raise ValueError("recall takes a chunk id or like=PICTURE: give one of the two")
        check_cosine("min_score", min_score)
        if like is not None:
            return self._perform_on_slot(Lookalike(like, min_score, move))
        assert chunk_id is not None, "one of the two is given"
        return self._perform_on_slot(Recall(chunk_id, move))

    @one_at_a_time
    def slide(self, n: int = 1) -> SlotReport:
        """Remove the ``n`` oldest chunks; the rest survive at the positions of a fresh window, no forward.

        Under another `ReusePolicy.on_leave` than "keep" they are repaired or prefilled again instead.
        """
        return self._perform_on_slot(requests.Slide(n))

    @one_at_a_time
    def evict(self, slot: Slot | int) -> SlotReport:
        """Remove one chunk from any place; it stays archived and can be recalled."""
        return self._perform_on_slot(requests.Evict(slot))

    @one_at_a_time
    def reorder(self, permutation: Sequence[int]) -> Report:
        """Put the chunks in another order: ``permutation[i]`` is the present index of the i-th.

        Chunks behind an unchanged prefix stay as they are; the others take the patch stored for
        their new antecedents (in this order, or the orbit patch of the set when the policy admits
        it).
        """
        return self._answer(requests.Reorder(permutation))[0]

    @one_at_a_time
    def condition(self, slot: Slot | int, on: bool) -> SlotReport:
        """Switch a chunk to its clean canonical view, and back: exact both ways, zero forwards."""
        return self._perform_on_slot(requests.Condition(slot, on))

    @one_at_a_time
    def insert(self, index: int, content: Content | Chunk, *, on_leave: OnLeave = "repair") -> Report:
        """Put a chunk before the slot at ``index``; chunks behind it are treated as in `Arrange`."""
        slots = self.slots
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index <= len(slots):
            raise ValueError(f"index {quote(index)} of a window of {len(slots)}: give 0..{len(slots)}")
        order = [*slots[:index], content, *slots[index:]]
        return self._answer(requests.Arrange(order, on_leave, operation="insert"))[0]

    @one_at_a_time
    def replace(self, slot: Slot | int, content: Content | Chunk, *, on_leave: OnLeave = "repair") -> Report:
        """Replace a chunk, which leaves, with another; chunks behind it are treated as in `Arrange`."""
        index, slots = self._state.index(slot), self.slots
        order = [*slots[:index], content, *slots[index + 1 :]]
        return self._answer(requests.Arrange(order, on_leave, operation="replace"))[0]

    @one_at_a_time
    def assemble(
        self,
        chunks: Sequence[Slot | Content | Chunk | str],
        max_tokens: int | None = None,
        order: Placing = "free",
    ) -> Report:
        """Make the window hold these chunks, in the order in which the least runs (paper, appendix E).

        ``chunks`` are slots, contents, chunks, or ids of stored chunks (a text is a content list). One that
        stands in the window keeps its KV where it can; slots that are not named leave. Chunks are treated as
        in `Arrange` under "repair", with its errors. ``max_tokens`` bounds anchor and chunks beside the
        window's own bound: each chunk stands, as given, that fits beside those before it, and a note names
        the others; WindowFull if none fits. ``order`` "free": the fewest tokens run, then the fewest
        forwards, of equal ones the order given; all orders of four chunks are priced, of more the most
        promising, and none that is dearer than the given one is taken. "given" keeps that. Later work is not
        counted.
        """
        check_placing(chunks, max_tokens, order)
        items = [*{self._id_of(item): item for item in map(self._item, chunks)}.values()]
        own, anchor = self._stage.max_tokens, self._former.anchor.length
        bounds = [bound for bound in (own, max_tokens) if bound is not None]
        chosen = fitting([self._length_of(item) for item in items], min(bounds) - anchor if bounds else None)
        standing = [items[i] for i in chosen]
        if order == "free":
            standing = cheapest_order(standing, self._price)
        out = [self._id_of(item)[:12] for i, item in enumerate(items) if i not in chosen]
        report = self._answer(requests.Arrange(standing, operation="assemble"))[0]
        note = f"{len(out)} of {len(items)} chunks do not fit: {', '.join(out)}"
        return replace(report, notes=(*report.notes, note)) if out else report

    @one_at_a_time
    def dependents(self, slot: Slot | int) -> dict[Slot, Cost]:
        """The slots that a chunk conditions, in order, and what each runs if it leaves and they are repaired.

        Plans alone: nothing runs. The repair is that of `Arrange`, whatever this window does with chunks that
        stay. Raises UnknownSlot.
        """
        index, slots = self._state.index(slot), self.slots
        rest = [*slots[:index], *slots[index + 1 :]]
        costs = [self.plan(requests.Arrange(rest[:count])).cost for count in range(index, len(slots))]
        behind = zip(rest[index:], pairwise(costs), strict=True)
        return {
            one: Cost(more.forwards - less.forwards, more.tokens - less.tokens)
            for one, (less, more) in behind
            if slots[index].chunk_id in one.antecedents
        }

    @one_at_a_time
    def search(self, like: Content | Chunk, k: int = 5) -> list[Hit]:
        """The ``k`` archived chunks that look most like a picture, best first: one vision encode, no forward.

        No encode for a picture that is archived itself. Raises ValueError for content without a picture.
        """
        self._check_backbone()
        return candidates(self._former, like, k)

    @one_at_a_time
    def prepare_orders(self, slots: Sequence[Slot | int] | None = None) -> Report:
        """Form and store patches by which every order of these neighbours runs 0 forwards; the window stays.

        ``slots`` are two to four neighbours (None: all slots). Each gets a patch behind each set of the
        others: an exact one behind one of them, an orbit patch (the mean over their orders) behind more. That
        takes 15 forwards of one chunk each for three chunks and 52 for four, less what is stored already, and
        as many of the chunks in front. A reorder is then "exact", "patched" and "orbit", if the policy admits
        these. Chunks behind the neighbours are placed by the policy as ever. Raises ValueError for others.
        """
        chosen = range(len(self)) if slots is None else [self._state.index(slot) for slot in slots]
        first, count = min(chosen, default=0), len(chosen)
        if sorted(chosen) != [*range(first, first + count)] or not 2 <= count <= MOST_NEIGHBOURS:
            raise ValueError(f"{count} slots: prepare_orders takes 2 to {MOST_NEIGHBOURS} neighbours")
        facts = self._state.facts
        with self._counting() as tally:
            form_orders(self._former, facts[:first], facts[first : first + count])
        report = tally.report("prepare_orders", None, self.slots)
        self._emit(None, report, self.slots, {})
        return report

    def anticipate(self) -> None:
        """Prepare the next departure in the background, as `append`, `recall` or `slide` will need it.

        The chunks that stay are placed behind their next antecedents as that operation would place them: when
        the next chunk does not fit into ``max_tokens``, or as the last `slide` had it. The operation then
        runs its new chunk alone. Any other starts from the window as it stands. A window does this by itself
        after an append or recall where departures run forwards (`ReusePolicy.exact`), as far as a prefix
        cache would have run as much for the departures so far. Returns at once; nothing is prepared where
        departures run none (`on_leave="keep"`).
        """
        prepare_departure(self)

    @one_at_a_time
    def run(self, plan: Plan | Request, *, chunks: Sequence[Chunk] = ()) -> Report:
        """Do what a plan shows, one that `plan` made for the window as it is, or what a request asks for.

        A plan out of JSON, or of another window, is made again and compared; ``chunks`` are those that it
        brings. Raises StalePlan for one that is not what this window would do now, UnknownChunk for a chunk
        that it was not given, and the errors of the operation. If a stored object turns out to be missing or
        damaged, the request is planned again without it.
        """
        return self._answer(plan, chunks=chunks)[0]

    @one_at_a_time
    def fork(self, *, apart: bool = False) -> KameraWindow:
        """A branch with the same chunks; nothing is copied until one of the two changes its own.

        ``apart``: with a live cache of its own from the start, for work beside this window.
        """
        branch = copy.copy(self)
        branch._lock = forks.Lock("this window")
        branch._account, branch._notes, branch._preparation = Account(), [], None
        branch._earned = 0
        branch._name = ""
        live = self._backbone.live(holds=True) if apart else self._stage.live.fork()
        branch._stage = replace(self._stage, live=live)
        self._family.add(branch)
        return branch

    # -- questions, which leave the window as it was -------------------------------------------

    @overload
    def generate(
        self, question: Words, *, keep: bool = ..., num_return_sequences: One = ..., **options: Any
    ) -> str: ...
    @overload
    def generate(
        self, question: Words, *, keep: bool = ..., num_return_sequences: int, **options: Any
    ) -> str | list[str]: ...
    @overload
    def generate(
        self, question: Ids, *, keep: bool = ..., num_return_sequences: One = ..., **options: Any
    ) -> str | torch.Tensor: ...
    @overload
    def generate(
        self, question: Ids, *, keep: bool = ..., num_return_sequences: int, **options: Any
    ) -> str | torch.Tensor | list[str] | list[torch.Tensor]: ...
    def generate(
        self, question: Question, *, keep: bool = False, **options: Any
    ) -> str | torch.Tensor | list[str] | list[torch.Tensor]:
        """Answer a question; without ``keep`` the window does not change.

        ``question`` is text, chat messages, or token ids ``[tokens]`` used as given. ``options``
        (max_new_tokens, do_sample, num_beams, streamer, …) go to ``generate`` of transformers; ValueError for
        others, before anything runs.
        Returns the answer's text, or token ids ``[new]`` without a processor; a list when several
        sequences are asked for. ``keep=True`` leaves question and answer in the window as a text
        chunk; an exchange larger than the window raises WindowFull, and its answer is lost.
        """
        with self._lock, self._account.count_now(self._backbone):
            self._check_backbone()
            self._backbone.check_sampling(options)
            asker = self._asker()
            rows = asker.answer_ids(question, **options)
            self._audit_one()
            if keep:
                self.append(asker.exchange_chunk(question, rows[0]))
            texts = [text for row in rows if (text := self._backbone.builder.detokenize(row)) is not None]
            if texts:
                return texts[0] if len(texts) == 1 else texts
            return rows[0] if len(rows) == 1 else list(rows)

    @one_at_a_time
    def next_token_logits(self, question: Question) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; the window does not change."""
        self._check_backbone()
        asker = self._asker()
        logits = asker.logits_of([question])[0]
        self._audit_one()
        return logits

    @one_at_a_time
    def is_load_bearing(self, slot: Slot | int, question: Question, *, max_new_tokens: int = 16) -> bool:
        """True if the answer changes without this chunk and the conditioning of others on it.

        First the cheap test (paper, appendix E): without the chunk, with later chunks on the best stored view
        that does not contain it, down to their canonicals. An unchanged answer decides for the price of a
        decode. A changed one decides only if no canonical was served blind; otherwise later chunks are
        prefilled without it, outside the window, and the answers compared.
        """
        index = self._state.index(slot)
        self._check_backbone()
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        answer = self._asker().answer_ids(question, **options)
        cheap = self._without(index, self._policy.as_cheap())
        if torch.equal(cheap.answer_ids(question, **options), answer):
            return False
        if "blind" not in cheap.state.seats.worths[index:]:
            return True
        sure = self._without(index, self._policy.as_forming())
        return not torch.equal(sure.answer_ids(question, **options), answer)

    # -- persistence ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait for all later work: archives, patches, audits. The next report names what was not kept."""
        later_of(self._backbone).flush()

    def save(self, path: str | Path) -> str:
        """Write the window to a directory of its own, bit for bit, in place of the window saved there.

        Returns the file's SHA-256, by which `load` knows it. Other threads' operations go on; a concurrent
        load gets the old window or the new one, and the last of several saves stays. Raises StoreError if the
        operating system refuses, or if the directory holds something else, which stays.
        """
        if self._former.queue is not None:  # without one its patches are formed at once
            for chunk_id in self._state.seats.chunk_ids:  # other later work goes on
                self._former.queue.flush_named((self._former.context, chunk_id))
        return save_window(user_path(path), self._stage, self._state, self._policy)

    @classmethod
    def load(
        cls,
        path: str | Path,
        backbone: HasEngine,
        store: ChunkStore,
        *,
        trace: str | os.PathLike[str] | None = None,
        digest: str | None = None,
    ) -> KameraWindow:
        """Bring a saved window back, bit for bit: with ``digest`` the one of which `save` returned that.

        Raises IncompatibleChunk for another backbone, CorruptChunk for a damaged file or another window's.
        ``trace`` as in the constructor.
        """
        check_store(store)
        engine = engine_of(backbone)
        window = cls.__new__(cls)
        window._begin(trace)
        with window._account.count_now(engine):
            parts = load_window(user_path(path), engine, store, digest)
            window._policy, window._stage, window._state = parts
            window._stage.show(window._state, Tally())
            queue_audits(window._stage, window._state, range(len(window)), window._policy.audit)
        return window

    # -- inside --------------------------------------------------------------------------------

    def _answer(
        self,
        request: Request | Lookalike | Plan,
        inquiry: Inquiry | None = None,
        *,
        chunks: Sequence[Chunk] = (),
    ) -> tuple[Report, torch.Tensor | None]:
        """One operation, and the answer's tokens ``[sequences, new]`` behind it, of an ``inquiry``.

        An error leaves the present state.
        """
        with self._counting() as tally:
            former, own_plan = self._former, None
            if isinstance(request, Lookalike):
                chunk_id = most_alike(former, self._state.seats.chunk_ids, request, tally)
                request = Recall(chunk_id, request.move)
            if isinstance(request, Plan):
                own_plan, named_request = self._own(request, chunks)
            else:
                named_request = self._names().name_request(request)
            policy = self._policy if own_plan is None else own_plan.policy
            departure = None if self._preparation is None else self._preparation.take()
            start, stage = self._state, self._stage
            if (
                own_plan is None
                and departure is not None
                and not (inquiry is not None and isinstance(request, requests.Slide))
                and fits(departure, named_request.request, stage, start, policy)
            ):
                start, stage = departure.state, departure.stage
            if departure is not None and start is departure.state and isinstance(request, requests.Slide):
                outcome = Done(departure.plan, start)  # it is the departure
            else:
                outcome = carry_out(named_request, start, stage, policy, tally, own_plan, inquiry)
            plan, state, answer = outcome
            stage.show(state, tally)
            queue_audits(stage, state, slots_to_audit(plan, state), self._policy.audit)
            tally.count_time("show")
        old, self._state, self._stage, self._plans = self.slots, state, stage, ()
        new_slots = {slot.number: slot for slot in self.slots}
        evicted = tuple(slot for slot in old if slot.number not in new_slots)
        slot = None if plan.arrived is None else new_slots[plan.arrived]
        report = tally.report(plan.operation, slot or (evicted[-1] if evicted else None), self.slots, evicted)
        self._emit(plan, report, old, named_request.pictures)
        anticipate_by_itself(self, plan, len(evicted))
        return report, answer

    def _perform_on_slot(self, request: Request | Lookalike) -> SlotReport:
        """The report of an edit by which a chunk arrives or leaves."""
        report = self._answer(request)[0]
        assert isinstance(report, SlotReport), f"{report.operation} concerns a slot"
        return report

    def _item(self, given: Slot | Content | Chunk | str) -> Slot | Chunk | Recall:
        """A chunk of `assemble` as `Arrange` takes it; one that stands in the window is its slot."""
        if isinstance(given, Slot):
            return self.slots[self._state.index(given)]
        item = Recall(given) if isinstance(given, str) else self._names().chunk_of(given)
        chunk_id = self._id_of(item)
        return next((slot for slot in self.slots if slot.chunk_id == chunk_id), item)

    def _id_of(self, item: Slot | Chunk | Recall) -> str:
        chunk: Any = item.chunk if isinstance(item, Recall) else item
        return whole_chunk_id(self._former, self._state.seats.chunk_ids, chunk)

    def _length_of(self, item: Slot | Chunk | Recall) -> int:
        if isinstance(item, Recall):
            return self._former.facts_of(self._id_of(item)).length
        return item.length if isinstance(item, Slot) else item.num_tokens

    def _price(self, items: Sequence[Any]) -> Price:
        """What a plan of these chunks in this order runs; infinite where the policy refuses it."""
        try:
            cost = self.plan(requests.Arrange(items)).cost
        except PolicyRefused:
            return math.inf, math.inf
        return cost.tokens, cost.forwards

    def _asker(self) -> Asker:
        return Asker(self._stage, self._state)

    def _without(self, index: int, policy: ReusePolicy) -> Asker:
        stage = replace(self._stage, live=self._backbone.live(), max_tokens=None)
        with stage.former.operation():
            named_request = NamedRequest(Without(index))
            return Asker(stage, carry_out(named_request, self._state, stage, policy, Tally()).state)

    def _audit_one(self) -> None:
        """Each question serves the whole window; one of its slots may be audited for it."""
        count = len(self._state.facts)
        if count:
            self._turn += 1
            queue_audits(self._stage, self._state, [self._turn % count], self._policy.audit)
