"""Decides what a page shows: events become lives of windows, with lanes, spans, marks and numbers.

It runs nothing and draws nothing. Beside what ran stands what two others would have run for the same windows:
a prefix cache of its own that forgets nothing, and a prefill of everything.
"""

from __future__ import annotations

import base64
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from kamera.window.events import Event, Outcome
from kamera.window.slots import Slot

MOST_PICTURES = 2_000
"""Pictures of a page; those of later chunks are left out."""


class Rival(NamedTuple):
    """Tokens and vision encodes that another way would have run for an operation."""

    tokens: int
    encodes: int


class Lane(NamedTuple):
    """One chunk of a life: its id, text, tokens, and a small JPEG file in base64, "" for none."""

    chunk_id: str
    label: str
    tokens: int
    picture: str


class Stay(NamedTuple):
    """A lane's chunk from one operation to another, both included, as long as its KV is the same.

    ``rank`` is that of a patch that serves it, ``patch_bytes`` its size; ``error`` is its own.
    ``departed`` is the share of its antecedents' tokens that has left. ``remembers`` are the lanes of
    antecedents that are not in front of it any more. ``clean``: it shows its canonical for the time being.
    """

    lane: int
    first: int
    last: int
    guarantee: str
    rank: int | None
    patch_bytes: int
    bytes: int
    error: float | None
    departed: float
    remembers: tuple[int, ...]
    clean: bool


class Mark(NamedTuple):
    """What an operation did with a lane's chunk, unless it stayed as it was."""

    operation: int
    lane: int
    how: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Deed:
    """One operation, with the window's lanes in order afterwards, and those that left.

    ``prefix`` is what a prefix cache would have run, ``whole`` a prefill of everything. ``later`` are the
    tokens that ran as background work of the window until then. ``memory``: bytes of live KV, copies,
    encodings, and of the store's objects in memory.
    """

    name: str
    time: float
    order: tuple[int, ...]
    left: tuple[int, ...]
    forwards: int
    tokens: int
    encodes: int
    taken: int
    prefix: Rival
    whole: Rival
    later: int
    seconds: float
    times: tuple[float, ...]
    turned: int
    patched: int
    memory: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass
class Life:
    """All operations on one window, or on the windows of one session.

    It goes on: ``last_event`` is the number of the event that it took last, among those of all lives.
    """

    name: str
    anchor_tokens: int = 0
    max_tokens: int | None = None
    lanes: list[Lane] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    last_event: int = 0
    _past_stays: list[Stay] = field(default_factory=list)
    _open_stays: dict[int, Stay] = field(default_factory=dict)
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    _patches: dict[int, int] = field(default_factory=dict)
    _later_work: dict[str, tuple[int, int]] = field(default_factory=dict)
    _prompts: dict[tuple[str | int, str], int] = field(default_factory=dict)

    def add(self, event: Event, number: int) -> None:
        """Take the event of a number."""
        report, at = event.report, len(self.deeds)
        slots = report.slots
        order = self._order(slots, event)
        outcomes = event.outcomes or tuple(Outcome("kept") for _ in slots)
        stays: dict[int, Stay] = {}
        front: set[str] = set()
        for lane, slot, outcome in zip(order, slots, outcomes, strict=True):
            if outcome.how not in ("kept", "moved"):
                self._patches[lane] = outcome.patch_bytes
            stays[lane] = self._span(lane, slot, at, front)
            front.add(slot.chunk_id)
            if outcome.how != "kept":
                self.marks.append(Mark(at, lane, outcome.how, outcome.tokens, outcome.reason))
        for lane, old in self._open_stays.items():
            if lane in stays and stays[lane][3:] == old[3:]:  # all behind lane, first and last
                stays[lane] = old._replace(last=at)
            else:
                self._past_stays.append(old)
        self._open_stays = stays
        later_work = event.usage.background
        self._later_work[event.window] = later_work.forwards, later_work.tokens
        self.deeds.append(
            Deed(
                event.operation,
                event.time,
                order,
                self._order(report.evicted, event),
                report.forwards,
                report.tokens_recomputed,
                report.vision_encodes,
                report.tokens_held,
                *self._rivals(event, outcomes),
                sum(tokens for _, tokens in self._later_work.values()),
                report.seconds,
                tuple(report.times),
                report.bytes_rotated,
                report.bytes_patched,
                (event.memory.live, event.memory.copies, event.memory.encodings, event.cached),
                report.notes,
            )
        )
        self.last_event, self.anchor_tokens, self.max_tokens = number, event.anchor_tokens, event.max_tokens

    @property
    def spans(self) -> list[Stay]:
        """Those of all lanes, in the order in which they begin."""
        return sorted([*self._past_stays, *self._open_stays.values()], key=attrgetter("first", "lane"))

    @property
    def later(self) -> tuple[int, int]:
        """Forwards and tokens of the background work of its windows."""
        forwards, tokens = (sum(part) for part in zip(*self._later_work.values(), strict=True))
        return forwards, tokens

    def to_document(self) -> dict[str, Any]:
        """The life as JSON types: rows of values, their names once."""
        return {
            "name": self.name,
            "anchor": self.anchor_tokens,
            "max": self.max_tokens,
            "later": self.later,
            "lanes": [list(lane) for lane in self.lanes],
            "deeds": [list(vars(deed).values()) for deed in self.deeds],
            "spans": [list(span) for span in self.spans],
            "marks": [list(mark) for mark in self.marks],
        }

    # -- inside --------------------------------------------------------------------------------

    def _order(self, slots: Sequence[Slot], event: Event) -> tuple[int, ...]:
        """Lanes of slots; a chunk that stands twice in a window has two."""
        met: dict[str, int] = defaultdict(int)
        order = []
        for slot in slots:
            order.append(self._lane(slot, met[slot.chunk_id], event))
            met[slot.chunk_id] += 1
        return tuple(order)

    def _lane(self, slot: Slot, nth: int, event: Event) -> int:
        number = self._numbers.get((slot.chunk_id, nth))
        if number is None:
            number = self._numbers[slot.chunk_id, nth] = len(self.lanes)
            self.lanes.append(Lane(slot.chunk_id, _label(slot, event), slot.length, ""))
        data, lane = event.pictures.get(slot.chunk_id), self.lanes[number]
        if data is not None and not lane.picture and number < MOST_PICTURES:
            self.lanes[number] = lane._replace(picture=base64.b64encode(data).decode())
        return number

    def _span(self, lane: int, slot: Slot, at: int, front: Collection[str]) -> Stay:
        missing_ids = [name for name in slot.antecedents if name not in front]
        has_patch = slot.rank is not None and slot.rank > 0
        return Stay(
            lane,
            at,
            at,
            slot.guarantee,
            slot.rank if has_patch else None,
            self._patches.get(lane, 0) if has_patch else 0,
            slot.bytes,
            slot.error,
            slot.departed,
            tuple(self._numbers[name, 0] for name in missing_ids if (name, 0) in self._numbers),
            not slot.conditioned,
        )

    def _rivals(self, event: Event, outcomes: Sequence[Outcome]) -> tuple[Rival, Rival]:
        """What a prefix cache and a prefill of everything run; nothing where the window holds the same."""
        slots = event.report.slots
        ids = [slot.chunk_id for slot in slots]
        old_ids = [slot.chunk_id for slot in event.before]
        if not self.deeds:  # a fork begins with what its window held
            self._count_known(event.anchor, old_ids)

        def of(first: int, extra: int) -> Rival:
            tokens = sum(slot.length for slot in slots[first:])
            return Rival(extra + tokens, sum(outcome.media for outcome in outcomes[first:]))

        prefix = of(self._count_known(event.anchor, ids), 0)
        return prefix, Rival(0, 0) if old_ids == ids else of(0, event.anchor_tokens)

    def _count_known(self, anchor: str, chunk_ids: Sequence[str]) -> int:
        """How many of the first chunks a prefix cache has, which forgets nothing; from now on it has all."""
        at: str | int = anchor
        count = 0
        for chunk_id in chunk_ids:
            count += (at, chunk_id) in self._prompts
            at = self._prompts.setdefault((at, chunk_id), len(self._prompts))
        return count


FIELDS = {
    "lane": tuple(Lane.__annotations__),
    "span": tuple(Stay.__annotations__),
    "mark": tuple(Mark.__annotations__),
    "deed": tuple(Deed.__annotations__),
}
"""Names of the values in the rows of a document."""


class Lives:
    """Lives that go on: a listener, which any thread may tell an event, and any may ask.

    ``most`` is how many are held, those told last; after so many ``operations`` one begins anew.
    """

    def __init__(self, most: int | None = None, operations: int | None = None) -> None:
        self._most, self._operations = most, operations
        self._lock = threading.Lock()
        self._lives: dict[str, Life] = {}
        self.count = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        name = event.session or event.window
        with self._lock:
            self.count += 1
            life = self._lives.setdefault(name, Life(name))
            if len(life.deeds) == self._operations:
                life = self._lives[name] = Life(name)
            life.add(event, self.count)
            if len(self._lives) - 1 == self._most:
                del self._lives[min(self._lives.values(), key=attrgetter("last_event")).name]

    def since(self, count: int = 0) -> list[dict[str, Any]]:
        """Documents of those that were told something after ``count`` events, in the order of their birth."""
        with self._lock:
            return [life.to_document() for life in self._lives.values() if life.last_event > count]


def lives(events: Iterable[Event]) -> list[Life]:
    """The lives that events tell, in the order in which they begin."""
    listener = Lives()
    for event in events:
        listener(event)
    return list(listener._lives.values())


def _label(slot: Slot, event: Event) -> str:
    """A chunk's label, with the beginning of its text unless that is in there."""
    text = event.texts.get(slot.chunk_id, "")
    if text[:20] in slot.label:
        return slot.label
    return text if text.startswith(slot.label) else f"{slot.label}: {text}"
