"""`KameraWindow`: a context window that is a deque. Every operation is a cache edit."""

from __future__ import annotations

import copy
import functools
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from PIL import Image

from kamera import forks
from kamera.content import Chunk, Content, Encoded, Spoken
from kamera.engines import Account, Engine, HasEngine, Recipe, Span, Spent, Usage, engine_of
from kamera.errors import PolicyRefused, StalePlan, WindowFull, quote
from kamera.files import user_path
from kamera.ops import CodedKV, kv_copy, kv_slice
from kamera.patches import (
    MOST_NEIGHBOURS,
    Ahead,
    Former,
    Losses,
    background_of,
    form_orbit,
    form_orders,
    prefill_anchor,
)
from kamera.store import ChunkStore, Hit, check_store, memory_of
from kamera.trust import ArchiveRule, OnLeave, ReusePolicy, policy_of, weakest
from kamera.window import requests
from kamera.window.background import Departure, count_leaving, depart, queue_audits, slots_to_audit
from kamera.window.engine import recipe_of, store_state
from kamera.window.events import Event, Listener, Trace, notify_listeners, outcomes, thumbnails
from kamera.window.plan import Placing, Plan, Price, cheapest_order, check_placing, fitting
from kamera.window.requests import (
    MIN_SCORE,
    Append,
    Lookalike,
    NamedRequest,
    Names,
    Newcomer,
    Recall,
    Request,
    Without,
)
from kamera.window.run import (
    Executor,
    Inquiry,
    Question,
    Report,
    SlotReport,
    Tally,
    TokenSequence,
    count_operation,
)
from kamera.window.save import load_window, save_window
from kamera.window.slots import (
    Holdings,
    Resident,
    Seat,
    Seats,
    Slot,
    WindowMemory,
    WindowState,
    holdings_of,
    memory_held,
    new_number,
    shift,
)

Given = ParamSpec("Given")
Result = TypeVar("Result")

Ids = torch.Tensor | Sequence[int]
"""Token ids ``[tokens]``."""

Words = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, or chat messages."""

One = Literal[1]

PLANS = 8
"""Plans of the present state whose chunks a window keeps for `KameraWindow.run`: the latest ones."""

BEGINNING = 24
"""Tokens of a chunk's text in events."""


def one_at_a_time(
    operation: Callable[Concatenate[KameraWindow, Given], Result],
) -> Callable[Concatenate[KameraWindow, Given], Result]:
    """An operation that waits until those of other threads on the same window are over."""

    @functools.wraps(operation)
    def alone(self: KameraWindow, /, *args: Given.args, **keywords: Given.kwargs) -> Result:
        with self._lock, self._account.count_now(self._backbone):
            return operation(self, *args, **keywords)

    return alone


class KameraWindow:
    """The deque of chunks in front of a question.

    ``system`` is the system prompt (text, messages, token ids, or None for the template's own);
    ``max_tokens`` bounds anchor and chunks together: `append` and `recall` slide by themselves if a chunk
    would not fit. ``on_leave`` says what becomes of the chunks that stay then
    (default: the policy's, `ReusePolicy.on_leave`).

    It is a sequence of its slots: ``window[0]``, ``window[-1]``, ``window[1:]``, ``for slot in window``,
    ``slot in window``, ``chunk_id in window``; an empty one is false. Its attributes cannot be set.

    ``trace`` is a file to which the event of each operation is written, without content (`Trace`); `kamera
    plan` makes a plan from it, `kamera view` a page.

    An operation succeeds whole or leaves the window as it was. Operations and questions of several threads on
    one window run one after another; different windows and forks, although they share KV, run concurrently.
    """

    _executor: Executor
    _state: WindowState
    _policy: ReusePolicy
    _lock: forks.Lock
    _account: Account
    _notes: list[str]  # for the next report
    _family: weakref.WeakSet[KameraWindow]  # it and its forks
    _listeners: tuple[Listener, ...]
    _name: str = ""  # in events
    _turn: int = 0  # questions so far
    _preparation: Ahead[Departure] | None = None  # from the first `anticipate` on
    _slid: int = 0  # chunks that left by the last departure, if that was a slide
    _earned: int = 0  # tokens of departures that a prefix cache would have run, less those of preparations
    _slots: tuple[WindowState, tuple[Slot, ...]] | None = None  # the slots of the state last asked for
    _plans: tuple[tuple[Plan, NamedRequest], ...] = ()  # of the present state, the latest ones

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
            self._executor = Executor.of(engine, store, anchor, self._policy, losses, max_tokens)
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
        if (
            isinstance(min_score, bool)
            or not isinstance(min_score, int | float)
            or not -1.0 <= min_score <= 1.0
        ):
            raise ValueError(f"min_score {quote(min_score)} is no cosine: give a number between -1.0 and 1.0")
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
        promising, and none that is dearer than the given one is taken. "given" keeps that. Background work is
        not counted.
        """
        check_placing(chunks, max_tokens, order)
        items = [*{self._id_of(item): item for item in map(self._item, chunks)}.values()]
        own, anchor = self._executor.max_tokens, self._former.anchor.length
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
    def dependents(self, slot: Slot | int) -> dict[Slot, Spent]:
        """The slots that a chunk conditions, in order, and what each runs if it leaves and they are repaired.

        Plans alone: nothing runs. The repair is that of `Arrange`, whatever this window does with chunks that
        stay. Raises UnknownSlot.
        """
        index, slots = self._state.index(slot), self.slots
        rest = [*slots[:index], *slots[index + 1 :]]
        costs = [self.plan(requests.Arrange(rest[:count])).cost for count in range(index, len(slots))]
        behind = zip(rest[index:], pairwise(costs), strict=True)
        return {
            one: Spent(more.forwards - less.forwards, more.tokens - less.tokens)
            for one, (less, more) in behind
            if slots[index].chunk_id in one.antecedents
        }

    @one_at_a_time
    def search(self, like: Content | Chunk, k: int = 5) -> list[Hit]:
        """The ``k`` archived chunks that look most like a picture, best first: one vision encode, no forward.

        No encode for a picture that is archived itself. Raises ValueError for content without a picture.
        """
        self._check_backbone()
        return self._names().candidates(like, k)

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
        encoded = self._state.encoded
        with self._counting() as tally:
            form_orders(self._former, encoded[:first], encoded[first : first + count])
        report = tally.report("prepare_orders", None, self.slots)
        self._emit(None, report, self.slots, {})
        return report

    @one_at_a_time
    def anticipate(self) -> None:
        """Prepare the next departure in the background, as `append`, `recall` or `slide` will need it.

        The chunks that stay are placed behind their next antecedents as that operation would place them: when
        the next chunk does not fit into ``max_tokens``, or as the last `slide` had it. The operation then
        runs its new chunk alone. Any other starts from the window as it stands. A window does this by itself
        after an append or recall where departures run forwards (`ReusePolicy.exact`), as far as a prefix
        cache would have run as much for the departures so far. Returns at once; nothing is prepared where
        departures run none (`on_leave="keep"`).
        """
        count = self._next_departure()
        if not count:
            if self._preparation is not None:
                self._preparation.take()
            return
        executor = replace(self._executor, live=self._backbone.live(holds=True))
        self._preparation = self._preparation or Ahead(self._backbone)
        self._preparation.begin(functools.partial(depart, count, self._state, executor, self._policy))

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
        live = self._backbone.live(holds=True) if apart else self._executor.live.fork()
        branch._executor = replace(self._executor, live=live)
        self._family.add(branch)
        return branch

    # -- what it holds -------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The chunks in order, with their places and guarantees."""
        state = self._state
        if self._slots is None or self._slots[0] is not state:
            anchor, size = self._former.anchor.length, self._backbone.facts.bytes_per_token
            self._slots = (state, state.slots(anchor, size))
        return self._slots[1]

    @property
    def policy(self) -> ReusePolicy:
        """What it serves, and what it does where it may not serve what is stored."""
        return self._policy

    def usage(self) -> Usage:
        """The model work of this window since its construction, now and later; a fork counts its own.

        After `flush` it equals hooks on the model.
        """
        return self._account.usage

    def memory(self) -> WindowMemory:
        """Bytes it holds: live cache, copies, encodings, and the part of them that its forks hold too."""
        return memory_held(self._holdings(), [w._holdings() for w in self._family if w is not self])

    def on_event(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with the `Event` of each operation; returns a function that ends this.

        Forks made from now on call it too. An error in it costs a warning, never the operation.
        """
        self._listeners = (*self._listeners, listener)

        def end() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return end

    @one_at_a_time
    def plan(self, request: Request, *, policy: ReusePolicy | None = None) -> Plan:
        """The plan of a request (`kamera.window.requests`).

        ``policy`` takes the place of the window's, for callers that judge the trust of single chunks
        themselves (`kamera.reuse`).
        """
        self._check_backbone()
        with self._former.operation():
            named_request = self._names().name_request(request)
            own_policy = self._policy if policy is None else policy_of(policy)
            plan = self._executor.plan(named_request, self._state, own_policy)
        self._plans = (*self._plans[-PLANS + 1 :], (plan, named_request))
        return plan

    @one_at_a_time
    def recipe(self) -> Recipe:
        """What another engine needs to show this window: token ids, borders, places, rows, guarantees.

        It is made of rows: no tensor is read, and nothing stored. `Recipe.missing` names the slots whose KV
        is in this window's memory alone, until `keep_kv` stores it.
        """
        self._check_backbone()
        return recipe_of(self._former, self._state)

    def __len__(self) -> int:
        return len(self._state.seats.seats)

    @overload
    def __getitem__(self, index: int) -> Slot: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Slot, ...]: ...
    def __getitem__(self, index: int | slice) -> Slot | tuple[Slot, ...]:
        try:
            return self.slots[index]
        except IndexError:
            raise IndexError(f"slot {index} of a window of {len(self)}") from None

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __contains__(self, what: object) -> bool:
        """True if a slot is in this window, or a chunk (by its id) in view."""
        if isinstance(what, Slot):
            return any(slot.number == what.number for slot in self.slots)
        chunk_id = what.id if isinstance(what, Chunk) else what
        return any(slot.chunk_id == chunk_id for slot in self.slots)

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"a window's {name!r} cannot be set: make a new KameraWindow with it")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        limit = "" if self._executor.max_tokens is None else f" of {self._executor.max_tokens}"
        tokens, guarantee = self._former.anchor.length, weakest(slot.guarantee for slot in self.slots)
        tokens += sum(slot.length for slot in self.slots)
        return f"KameraWindow({len(self)} chunks, {tokens}{limit} tokens, {guarantee})"

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
            rows = self._executor.answer_ids(self._state, question, **options)
            self._audit_one()
            if keep:
                self.append(self._executor.exchange_chunk(question, rows[0]))
            texts = [text for row in rows if (text := self._backbone.builder.detokenize(row)) is not None]
            if texts:
                return texts[0] if len(texts) == 1 else texts
            return rows[0] if len(rows) == 1 else list(rows)

    @one_at_a_time
    def next_token_logits(self, question: Question) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; the window does not change."""
        self._check_backbone()
        logits = self._executor.logits_of(self._state, [question])[0]
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
        answer = self._executor.answer_ids(self._state, question, **options)
        executor, state = self._without(index, self._policy.as_cheap())
        if torch.equal(executor.answer_ids(state, question, **options), answer):
            return False
        if "blind" not in state.seats.guarantees[index:]:
            return True
        executor, state = self._without(index, self._policy.as_forming())
        return not torch.equal(executor.answer_ids(state, question, **options), answer)

    # -- persistence ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait for background work: archives, patches, audits. The next report names what was not kept."""
        background_of(self._backbone).flush()

    def save(self, path: str | Path) -> str:
        """Write the window to a directory of its own, bit for bit, in place of the window saved there.

        Returns the file's SHA-256, by which `load` knows it. Other threads' operations go on; a concurrent
        load gets the old window or the new one, and the last of several saves stays. Raises StoreError if the
        operating system refuses, or if the directory holds something else, which stays.
        """
        if self._former.queue is not None:  # without one its patches are formed at once
            for chunk_id in self._state.seats.chunk_ids:  # other background work goes on
                self._former.queue.flush_named((self._former.context, chunk_id))
        return save_window(user_path(path), self._executor, self._state, self._policy)

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
            window._policy, window._executor, window._state = parts
            window._executor.show(window._state)
            queue_audits(window._executor, window._state, range(len(window)), window._policy.audit)
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
            own_plan = None
            if isinstance(request, Lookalike):
                chunk_id = self._names().most_alike(request, tally.notes)
                request = Recall(chunk_id, request.move)
            if isinstance(request, Plan):
                own_plan, named_request = self._own(request, chunks)
            else:
                named_request = self._names().name_request(request)
            policy = self._policy if own_plan is None else own_plan.policy
            departure = self._take_departure(named_request.request, policy)
            is_slide = isinstance(named_request.request, requests.Slide)
            if own_plan is not None or (is_slide and inquiry is not None):
                departure = None  # a plan starts from the window as it is, and an answer needs a run
            state, executor, answer = self._state, self._executor, None
            if departure is not None:
                state, executor = departure.state, departure.executor
            if departure is not None and is_slide:
                plan = departure.plan  # it is the departure
            else:
                plan, state, answer = executor.run(named_request, state, policy, tally, own_plan, inquiry)
            executor.show(state, tally)
            if self._policy.audit:
                queue_audits(executor, state, slots_to_audit(plan, state), self._policy.audit)
            tally.count_time("show")
        old, self._state, self._executor, self._plans = self.slots, state, executor, ()
        new_slots = {slot.number: slot for slot in self.slots}
        evicted = tuple(slot for slot in old if slot.number not in new_slots)
        slot = None if plan.arrived is None else new_slots[plan.arrived]
        report = tally.report(plan.operation, slot or (evicted[-1] if evicted else None), self.slots, evicted)
        self._emit(plan, report, old, named_request.pictures)
        self._anticipate(plan, len(evicted))
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
        return self._names().whole_id(item.chunk if isinstance(item, Recall) else item)

    def _length_of(self, item: Slot | Chunk | Recall) -> int:
        if isinstance(item, Recall):
            return self._former.encoded_of(self._id_of(item)).num_tokens
        return item.length if isinstance(item, Slot) else item.num_tokens

    def _price(self, items: Sequence[Any]) -> Price:
        """What a plan of these chunks in this order runs; infinite where the policy refuses it."""
        try:
            cost = self.plan(requests.Arrange(items)).cost
        except PolicyRefused:
            return math.inf, math.inf
        return cost.tokens, cost.forwards

    def _without(self, index: int, policy: ReusePolicy) -> tuple[Executor, WindowState]:
        """The window as if the chunk at ``index`` had never been there, on a live cache of its own."""
        executor = replace(self._executor, live=self._backbone.live(), max_tokens=None)
        with executor.former.operation():
            named_request = NamedRequest(Without(index))
            return executor, executor.run(named_request, self._state, policy, Tally())[1]

    def _audit_one(self) -> None:
        """Each question serves the whole window; one of its slots may be audited for it."""
        count = len(self._state.encoded)
        if count and self._policy.audit:
            self._turn += 1
            queue_audits(self._executor, self._state, [self._turn % count], self._policy.audit)

    @property
    def _former(self) -> Former:
        return self._executor.former

    @property
    def _backbone(self) -> Engine:
        return self._former.backbone

    def _begin(self, trace: str | os.PathLike[str] | None) -> None:
        """Give the window an account, and nothing else yet."""
        self._lock, self._family = forks.Lock("this window"), weakref.WeakSet([self])
        self._account, self._notes = Account(), []
        self._listeners = () if trace is None else (Trace(trace),)

    @contextmanager
    def _counting(self) -> Iterator[Tally]:
        """Context of one operation: its work is counted, its losses noted, each object looked up once."""
        self._former.anchor.identity.check(self._backbone)
        with count_operation(self._backbone) as tally:
            tally.notes.extend(self._notes)
            self._notes = []
            former = self._former
            with former.losses.note_in(tally.notes), former.operation():
                yield tally

    def _holdings(self) -> Holdings:
        return holdings_of(self._former.anchor, self._state, self._executor.live)

    def _texts(self, old_ids: Collection[str]) -> dict[str, str]:
        """Beginnings of the texts of chunks that are not known."""
        new = [encoded for encoded in self._state.encoded if encoded.chunk_id not in old_ids]
        texts = {f.chunk_id: self._backbone.builder.detokenize(f.input_ids[:BEGINNING]) for f in new}
        return {name: " ".join(text.split()) for name, text in texts.items() if text and not text.isspace()}

    def _emit(
        self, plan: Plan | None, report: Report, before: tuple[Slot, ...], pictures: Mapping[str, Image.Image]
    ) -> None:
        if not self._listeners:
            return
        self._name = self._name or secrets.token_hex(4)
        event = Event(
            operation=report.operation,
            time=time.time(),
            anchor=self._former.anchor.digest,
            plan=plan,
            report=report,
            before=before,
            window=self._name,
            anchor_tokens=self._former.anchor.length,
            max_tokens=self._executor.max_tokens,
            usage=self.usage(),
            memory=memory_held(self._holdings()),
            cached=memory_of(self._former.store).bytes,
            outcomes=() if plan is None else outcomes(plan, before, report.slots, self._state.residents),
            later=Spent() if plan is None else plan.later,
            pictures=thumbnails(pictures, report.slots, before),
            texts=self._texts({slot.chunk_id for slot in before}),
        )
        notify_listeners(self._listeners, event)

    def _names(self) -> Names:
        return Names(self._former, self._state)

    def _own(self, plan: Plan, chunks: Sequence[Chunk]) -> tuple[Plan, NamedRequest]:
        """A plan and its request. Raises StalePlan unless it is what this window would plan now.

        One that this window made in its present state is taken as it is; any other is made again under the
        window's own policy, and compared.
        """
        seats = self._state.seats
        for own_plan, named_request in self._plans:
            if own_plan is plan and plan.before is seats:
                return own_plan, named_request
        what = f"the plan of {plan.operation} was made for another state of a window"
        if len(plan.before.seats) != len(seats.seats):
            raise StalePlan(
                f"{what}, of {len(plan.before.seats)} chunks; this one has {len(seats.seats)}: plan anew"
            )
        if plan.policy != self._policy:
            raise StalePlan(f"the plan of {plan.operation} was made under another policy: plan anew")
        named_request = self._names().again(plan.request, chunks)
        again = self._executor.plan(named_request, self._state, self._policy)
        if again.comparable_text() != plan.comparable_text():
            raise StalePlan(f"{what}, or of its store: plan anew")
        return again, named_request

    def _check_backbone(self) -> None:
        """Raise unless the model is the one that computed this window's KV."""
        self._former.anchor.identity.check(self._backbone)

    # -- the next departure --------------------------------------------------------------------

    def _take_departure(self, request: Request, policy: ReusePolicy) -> Departure | None:
        """The departure that was prepared, if an operation starts where it ends; it is given once."""
        departure = None if self._preparation is None else self._preparation.take()
        fits = departure is not None and departure.fits(request, self._executor, self._state, policy)
        return departure if fits else None

    def _next_departure(self) -> int:
        """How many chunks will probably leave next: for a chunk like the last one, or by a slide."""
        encoded = self._state.encoded
        if not encoded:
            return 0
        last = Newcomer(encoded[-1].chunk_id, encoded[-1].num_tokens)
        leaving = count_leaving(self._executor, self._state, self._policy, last)
        return leaving or (self._slid if self._slid < len(encoded) else 0)

    def _anticipate(self, plan: Plan, left: int) -> None:
        """After an operation by which ``left`` chunks left, prepare the next departure within a ledger.

        Each departure is worth what a prefix cache runs for it: the chunks that stay. A preparation costs as
        much, used or not, so a window that guesses wrong waits for its next departure.
        """
        if plan.operation not in ("append", "recall", "slide"):
            return
        if left:  # also where the departure itself was prepared, and is no part of the plan
            self._earned += sum([seat.length for seat in plan.after.seats if seat.number != plan.arrived])
            self._slid = left if plan.operation == "slide" else 0
        policy = self._policy
        if plan.operation == "slide" or (policy.on_leave == "keep" and policy.minimum != "exact"):
            return
        count = self._next_departure() if self._earned else 0
        cost = sum([seat.length for seat in plan.after.seats[count:]])
        if count and cost <= self._earned:
            self._earned -= cost
            self.anticipate()


# -- functions that take a window, for what few ask of it -----------------------------------------


def sequence_of(window: KameraWindow) -> TokenSequence:
    """The token sequence of a window, its system prompt included."""
    executor, state = window._executor, window._state
    ids, positions = executor.sequence(state, executor.former.anchor.input_ids[:0])
    return TokenSequence(ids, shift(positions, [-f for f in state.seats.frame]))


def former_of(window: KameraWindow) -> Former:
    """The `Former` of a window: its ``backbone``, its ``store``, its ``anchor`` (the system prompt), …."""
    return window._former


@one_at_a_time
def shown_spans(window: KameraWindow) -> tuple[Span, ...]:
    """Copies of the KV of anchor and slots as the live cache shows them, in order, with its positions there.

    Its phase is that of these positions, which a slide may move as a whole against the window's own.
    """
    window._check_backbone()
    executor, state = window._executor, window._state
    executor.show(state)
    places = [shift(executor.former.anchor.positions, state.seats.frame), *state.positions]
    return tuple(
        Span.computed(kv_copy(executor.live.read(i)), positions) for i, positions in enumerate(places)
    )


@one_at_a_time
def cut_text(window: KameraWindow, slot: Slot | int, at: Sequence[int]) -> tuple[Slot, ...]:
    """Make a text several chunks, cut before these of its tokens (ascending): no forward, no KV changes.

    Returns the slots of its parts. What was not prefilled in this window as it stands (a picture, a patched
    or canonical chunk) is not cut, and its slot returned. ValueError for tokens that are not inside.
    """
    state = window._state
    index = state.index(slot)
    seat, resident = state.seats.seats[index], state.residents[index]
    borders = [*pairwise([0, *at, resident.encoded.num_tokens])]
    if any(start >= stop for start, stop in borders):
        raise ValueError(f"at {quote(at)} are no ascending tokens inside of {resident.encoded.num_tokens}")
    if not _is_plain(seat, resident):
        return (window.slots[index],)
    label, parts = resident.encoded.label, list[Encoded]()
    for start, stop in borders:
        ids = resident.encoded.input_ids[start:stop]
        chunk = window._backbone.chunk_from_tensors(ids, label=label)
        parts.append(Encoded(ids, chunk_id=chunk.id, label=label))
    window._state, window._plans = _cut(state, index, parts, window._executor), ()
    return window.slots[index : index + len(parts)]


@one_at_a_time
def keep_first(window: KameraWindow, count: int) -> None:
    """Let all slots behind the first ``count`` leave: no forward, no KV changes, and nothing is archived."""
    state = window._state
    seats = Seats(state.seats.seats[:count], state.seats.frame)
    tensors = {seat.number: state.tensors[seat.number] for seat in seats.seats}
    window._state, window._plans = WindowState(seats, tensors), ()


@one_at_a_time
def keep_kv(window: KameraWindow) -> Recipe:
    """Store the KV that every slot shows. Return the recipe of the window, which then lacks nothing.

    Canonicals and the anchor are stored as always, and KV that was run in this window (prefilled behind
    antecedents, survivors included) by its content. No forward runs. Raises StoreError.
    """
    window._check_backbone()
    background_of(window._backbone).flush()
    window._state, window._plans = store_state(window._executor.former, window._state), ()
    return recipe_of(window._executor.former, window._state)


@one_at_a_time
def keep_orbit(
    window: KameraWindow, slot: Slot | int, *, samples: int | None = None, seed: int = 0
) -> SlotReport:
    """Form and store the orbit patch of a chunk over orderings of the chunks before it.

    By default over a small balanced set of orderings; ``samples`` asks for more, or fewer (`orderings`). The
    window itself does not change.
    """
    index, chunks = window._state.index(slot), window._state.encoded
    with window._counting() as tally:
        form_orbit(window._executor.former, chunks[index], chunks[:index], samples=samples, seed=seed)
    report = tally.report("keep_orbit", window.slots[index], window.slots)
    window._emit(None, report, window.slots, {})
    assert isinstance(report, SlotReport)
    return report


@one_at_a_time
def next_token_logits_of(window: KameraWindow, questions: Sequence[Question]) -> torch.Tensor:
    """Logits ``[questions, vocabulary]`` of each answer's first token; the questions share forwards."""
    window._check_backbone()
    return window._executor.logits_of(window._state, questions)


@one_at_a_time
def answer_of(window: KameraWindow, question: Question, *, max_new_tokens: int) -> torch.Tensor:
    """Token ids ``[new]`` of the likeliest answer, of at most so many tokens."""
    window._check_backbone()
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    return window._executor.answer_ids(window._state, question, **options)[0]


@one_at_a_time
def logits_of_answers(
    window: KameraWindow, asked: Sequence[tuple[Question, torch.Tensor]]
) -> list[torch.Tensor]:
    """Logits ``[tokens, vocabulary]`` of the tokens of each answer, for questions and answers."""
    window._check_backbone()
    return window._executor.logits_of_answers(window._state, asked)


@one_at_a_time
def respond(
    window: KameraWindow, /, question: Question, request: Request | Plan, **options: Any
) -> tuple[str | torch.Tensor, Report]:
    """Run a request or a plan, and answer a question behind it; new chunks share its forward.

    Returns the answer, as text or without a processor as token ids ``[new]``, and the operation's report. The
    next text at the tail that begins with question and answer takes over their KV. ``options`` as for
    `generate`, of one sequence. An error leaves the window as it was. Raises the errors of `run` and
    `generate`.
    """
    backbone = window._backbone
    backbone.check_sampling(options)
    if (several := options.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences={several}: a response is one answer")
    ids = window._executor.question_ids(question)
    report, rows = window._answer(request, (ids, options))
    assert rows is not None, "an inquiry is answered"
    window._audit_one()
    text = backbone.builder.detokenize(rows[0])
    return rows[0] if text is None else text, report


def _is_plain(seat: Seat, resident: Resident) -> bool:
    """True for a text that shows the KV of its prefill."""
    encoded, span, source = resident.encoded, resident.span, seat.source
    is_text = encoded.is_text and not source.home.shape
    is_prefilled = span.patch is None and seat.clean is None and not source.canonical
    return is_text and is_prefilled and not isinstance(span.kv, CodedKV)


def _cut(state: WindowState, index: int, encoded: Sequence[Encoded], executor: Executor) -> WindowState:
    """The state with a text in parts, each prefilled behind those before it."""
    row, span, start = state.seats.seats, state.residents[index].span, 0
    seat, parts, tensors = row[index], list[Seat](), dict(state.tensors)
    antecedents = seat.source.antecedents
    for part in encoded:
        stop = start + part.num_tokens
        places = span.positions[:, start:stop]
        home = executor.spots.spot(part, places)
        source = replace(seat.source, home=home, antecedents=antecedents, behind=seat.source.behind + start)
        new = replace(
            seat,
            chunk_id=part.chunk_id,
            length=part.num_tokens,
            spot=home.shift(seat.offset),
            source=source,
            archived=False,
            number=new_number(),
        )
        parts.append(new)
        tensors[new.number] = Resident(
            part, Span.computed(executor.live.hold(kv_slice(span.kv, start, stop)), places)
        )
        antecedents, start = (*antecedents, part.chunk_id), stop
    part_ids = [part.chunk_id for part in encoded]
    others = [_with_parts(other, seat.chunk_id, part_ids) for other in row[index + 1 :]]
    del tensors[seat.number]
    return WindowState(replace(state.seats, seats=(*row[:index], *parts, *others)), tensors)


def _with_parts(seat: Seat, whole_id: str, parts: Sequence[str]) -> Seat:
    """A chunk whose antecedents name the parts in place of the whole: the tokens are the same."""
    source = seat.source
    if whole_id not in source.antecedents:
        return seat
    antecedents = tuple(n for name in source.antecedents for n in (parts if name == whole_id else (name,)))
    return replace(seat, source=replace(source, antecedents=antecedents))
