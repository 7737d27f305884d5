"""The contents of a window, and its sequence methods: length, indexing, iteration, membership."""

from __future__ import annotations

import functools
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar, overload

from kamera import forks
from kamera.content import Chunk
from kamera.engines import Account, Engine, Recipe, Usage
from kamera.errors import StalePlan
from kamera.patches import Ahead, Former
from kamera.store import memory_of
from kamera.trust import ReusePolicy, policy_of, weakest
from kamera.window.events import Event, Listener, Trace, notify_listeners, outcomes, thumbnails
from kamera.window.memory import Holdings, WindowMemory
from kamera.window.naming import NamedRequest, Names, Pictures
from kamera.window.recipe import recipe_of
from kamera.window.report import Report, Tally, count_operation
from kamera.window.requests import Request
from kamera.window.stage import Departure, Stage
from kamera.window.state import Slot, WindowState
from kamera.window.steps import Cost, Plan

Given = ParamSpec("Given")
Result = TypeVar("Result")


Owner = TypeVar("Owner", bound="Contents")


def one_at_a_time(
    operation: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """An operation that waits until those of other threads on the same window are over."""

    @functools.wraps(operation)
    def alone(self: Owner, /, *args: Given.args, **keywords: Given.kwargs) -> Result:
        with self._lock, self._account.count_now(self._backbone):
            return operation(self, *args, **keywords)

    return alone


PLANS = 8
"""Plans of the present state whose chunks a window keeps for `KameraWindow.run`: the latest ones."""

BEGINNING = 24
"""Tokens of a chunk's text in events."""


class Contents:
    """The read-only view of a window.

    It is a sequence of its slots: ``window[0]``, ``window[-1]``, ``window[1:]``, ``for slot in window``,
    ``slot in window``, ``chunk_id in window``; an empty one is false. Its attributes cannot be set.
    """

    _stage: Stage
    _state: WindowState
    _policy: ReusePolicy
    _lock: forks.Lock
    _account: Account
    _notes: list[str]  # for the next report
    _family: weakref.WeakSet[Contents]  # it and its forks
    _listeners: tuple[Listener, ...]
    _name: str = ""  # in events
    _preparation: Ahead[Departure] | None = None  # from the first `anticipate` on
    _slid: int = 0  # chunks that left by the last departure, if that was a slide
    _earned: int = 0  # tokens of departures that a prefix cache would have run, less those of preparations
    _slots: tuple[WindowState, tuple[Slot, ...]] | None = None  # the slots of the state last asked for
    _plans: tuple[tuple[Plan, NamedRequest], ...] = ()  # of the present state, the latest ones

    @property
    def _former(self) -> Former:
        return self._stage.former

    @property
    def _backbone(self) -> Engine:
        return self._former.backbone

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The chunks in order, with their places and guarantees."""
        state = self._state
        if self._slots is None or self._slots[0] is not state:
            anchor, size = self._former.anchor.length, self._backbone.facts.bytes_per_token
            self._slots = (state, state.slots(anchor, size))
        return self._slots[1]

    def usage(self) -> Usage:
        """The model work of this window since its construction, now and later; a fork counts its own.

        After `flush` it equals hooks on the model.
        """
        return self._account.usage

    def memory(self) -> WindowMemory:
        """Bytes it holds: live cache, copies, encodings, and the part of them that its forks hold too."""
        return self._holdings().memory(w._holdings() for w in self._family if w is not self)

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
            plan = self._stage.plan(named_request, self._state, own_policy)
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
        limit = "" if self._stage.max_tokens is None else f" of {self._stage.max_tokens}"
        tokens, worth = self._former.anchor.length, weakest(slot.guarantee for slot in self.slots)
        tokens += sum(slot.length for slot in self.slots)
        return f"KameraWindow({len(self)} chunks, {tokens}{limit} tokens, {worth})"

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
        return Holdings.of(self._former.anchor, self._state, self._stage.live)

    def _texts(self, old_ids: Collection[str]) -> dict[str, str]:
        """Beginnings of the texts of chunks that are not known."""
        new = [facts for facts in self._state.facts if facts.chunk_id not in old_ids]
        texts = {f.chunk_id: self._backbone.builder.detokenize(f.encoded.input_ids[:BEGINNING]) for f in new}
        return {name: " ".join(text.split()) for name, text in texts.items() if text and not text.isspace()}

    def _emit(self, plan: Plan | None, report: Report, before: tuple[Slot, ...], pictures: Pictures) -> None:
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
            max_tokens=self._stage.max_tokens,
            usage=self.usage(),
            memory=self._holdings().memory([]),
            cached=memory_of(self._former.store).bytes,
            outcomes=() if plan is None else outcomes(plan, before, report.slots, self._state.residents),
            later=Cost() if plan is None else plan.later,
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
        again = self._stage.plan(named_request, self._state, self._policy)
        if again.comparable_text() != plan.comparable_text():
            raise StalePlan(f"{what}, or of its store: plan anew")
        return again, named_request

    def _check_backbone(self) -> None:
        """Raise unless the model is the one that computed this window's KV."""
        self._former.anchor.identity.check(self._backbone)
