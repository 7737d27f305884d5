"""Events that a window sends to its listeners, one for each operation; a trace is a file of them.

A trace is without content unless that is asked for.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from PIL import Image

from kamera.engines import Spent, Usage
from kamera.errors import TraceError, quote
from kamera.files import user_path
from kamera.window.plan import Place, Plan, Prefill, Reason
from kamera.window.run import Report, SlotReport, Times
from kamera.window.slots import Resident, Seat, Slot, Source, WindowMemory

logger = logging.getLogger(__name__)

How = Literal["kept", "moved", "stored", "patched", "prefilled"]
"""What an operation did with a chunk.

It stays as it is, or at another place; it is served from its stored canonical, or from that and a patch; all
of its tokens ran whose KV was not at hand.
"""


class Outcome(NamedTuple):
    """What an operation did with one chunk, the tokens that ran for it, and why no stored KV served.

    ``patch_bytes`` are those of a patch that was applied. ``media``: the chunk has pictures.
    """

    how: How
    tokens: int = 0
    reason: Reason = ""
    patch_bytes: int = 0
    media: bool = False


@dataclass(frozen=True)
class Event:
    """One operation that succeeded: what it was to do, what it did, and what that cost.

    ``time`` is its end, in seconds since 1970. ``window`` names the window (a fork has a name of its own),
    ``session`` the conversation that it belongs to, "" for none. ``anchor`` is the digest of the
    ``anchor_tokens`` tokens in front, ``max_tokens`` the window's bound.

    ``before`` are the slots before the operation; the ``report`` has those after it, and ``outcomes`` has one
    entry for each of these. ``later`` is the planned cost of what it leaves for background work, ``usage``
    the account of the window so far, ``memory`` the bytes that it holds, those of forks included, and
    ``cached`` those of objects in the memory of its store.

    ``pictures`` are small JPEG files of chunks that came by it, by chunk id, as far as their pictures are at
    hand, and ``texts`` the beginnings of what they say. ``plan`` is the plan that ran: None for `keep_orbit`,
    which plans nothing, and out of a trace, which holds no plans (`Plan.to_json` writes them). The ``report``
    has the bytes that were written.
    """

    operation: str
    time: float
    anchor: str
    plan: Plan | None = field(compare=False)
    report: Report
    before: tuple[Slot, ...]
    window: str
    anchor_tokens: int
    max_tokens: int | None
    usage: Usage
    memory: WindowMemory
    cached: int
    outcomes: tuple[Outcome, ...] = ()
    later: Spent = field(default_factory=Spent)
    session: str = ""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def first_placement(self) -> int:
        """Index of the first chunk that is placed anew; chunks that merely survive do not count.

        Each chunk from there on needed a patch for those before it.
        """
        before, after = self.before, self.report.slots
        if self.operation in ("append", "recall"):
            numbers = {slot.number for slot in before}
            return len(after) - (after[-1].number not in numbers)  # a recall of a chunk in view moves nothing
        if self.operation == "reorder":
            matches = (old.number == new.number for old, new in zip(before, after, strict=False))
            return next((i for i, same in enumerate(matches) if not same), min(len(before), len(after)))
        return len(after)

    def without_content(self) -> Event:
        """The same event without texts and pictures: ids, numbers and times."""
        old, before = self.report, tuple(map(_bare, self.before))
        slots, evicted = tuple(map(_bare, old.slots)), tuple(map(_bare, old.evicted))
        report = replace(old, slot=old.slot and _bare(old.slot), slots=slots, evicted=evicted)
        return replace(self, report=report, before=before, pictures={}, texts={})

    def to_json(self) -> str:
        """The event as one line of JSON, without its plan."""
        report, ids, slots = self.report, dict[str, int](), dict[Slot, int]()

        def number_of(chunk_id: str) -> int:
            return ids.setdefault(chunk_id, len(ids))

        def numbers_of(several: Sequence[Slot]) -> list[int]:
            return [slots.setdefault(slot, len(slots)) for slot in several]

        document: dict[str, Any] = {"format": FORMAT, **{name: getattr(self, name) for name in _OWN}}
        document |= {"after": numbers_of(report.slots), "before": numbers_of(self.before)}
        document["evicted"] = numbers_of(report.evicted)
        document["slot"] = None if report.slot is None else numbers_of([report.slot])[0]
        document["slots"] = [_row(s, number_of(s.chunk_id), [*map(number_of, s.antecedents)]) for s in slots]
        document["ids"] = [*ids]
        document["outcomes"] = [list(outcome) for outcome in self.outcomes]
        document["report"] = {name: getattr(report, name) for name in _COSTS}
        document["times"] = list(report.times)
        document["notes"] = report.notes
        document["later"] = list(self.later)
        document["usage"] = [list(counts) for counts in self.usage]
        document["memory"] = asdict(self.memory)
        if self.pictures:
            document["pictures"] = {k: base64.b64encode(v).decode() for k, v in self.pictures.items()}
        if self.texts:
            document["texts"] = dict(self.texts)
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Event:
        """An event out of `to_json`. Raises ValueError for anything else."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise ValueError("it has another format")
            return _event(document)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"{quote(text)} is no event ({type(error).__name__}: {error})") from None


Listener = Callable[[Event], object]
"""What a window calls with each event (`KameraWindow.on_event`)."""


def notify_listeners(listeners: tuple[Listener, ...], event: Event) -> None:
    """Call each listener; an error in one is logged as a warning and never fails the operation."""
    for listener in listeners:
        try:
            listener(event)
        except Exception as error:
            logger.warning("an event of %s was not heard: %s", event.operation, error)


def outcomes(
    plan: Plan, before: Sequence[Slot], after: Sequence[Slot], chunks: Sequence[Resident]
) -> tuple[Outcome, ...]:
    """What a plan did with each slot of ``after``, whose tensors are ``chunks``."""
    steps = {s.seat.number: s for s in plan.steps if isinstance(s, Place | Prefill)}
    places = {slot.number: slot.position for slot in before}
    out: list[Outcome] = []
    for slot, chunk in zip(after, chunks, strict=True):
        has_media, factors = bool(chunk.encoded.tensors), chunk.span.patch
        match steps.get(slot.number):
            case Place(Seat(source=Source(patch=patch)), tokens):
                how: How = "patched" if patch else "prefilled" if tokens else "stored"
                why: Reason = "no canonical" if tokens else ""
                out.append(Outcome(how, tokens, why, factors.nbytes if factors else 0, has_media))
            case Prefill() as step:
                out.append(Outcome("prefilled", step.tokens, step.reason, media=has_media))
            case _:
                stays = places.get(slot.number) == slot.position
                out.append(Outcome("kept" if stays else "moved", media=has_media))
    return tuple(out)


def _bare(slot: Slot) -> Slot:
    return replace(slot, label="")


SIDE = 88
"""Longest side of a thumbnail in pixels."""


def thumbnails(
    pictures: Mapping[str, Image.Image], after: Sequence[Slot], before: Sequence[Slot]
) -> dict[str, bytes]:
    """JPEG files of those ``pictures``, by chunk id, whose chunks came between ``before`` and ``after``."""
    old_ids = {slot.chunk_id for slot in before}
    new_ids = {slot.chunk_id for slot in after} - old_ids
    files = {name: thumbnail(picture) for name, picture in pictures.items() if name in new_ids}
    return {name: data for name, data in files.items() if data}


def thumbnail(picture: Image.Image) -> bytes:
    """A picture as a small JPEG file, which stays as it is; nothing of one that was closed meanwhile."""
    try:
        small, file = picture.convert("RGB"), io.BytesIO()
        small.thumbnail((SIDE, SIDE))
        small.save(file, "JPEG", quality=72)
    except (OSError, ValueError):
        return b""
    return file.getvalue()


FORMAT = 1
"""Of a trace's lines; a line of another one is refused."""

_OWN = ("time", "operation", "session", "window", "anchor", "anchor_tokens", "max_tokens", "cached")
_COSTS = (
    *("forwards", "tokens_recomputed", "tokens_held", "vision_encodes"),
    *("bytes_rotated", "bytes_patched", "seconds"),
)
_DEFAULTS = {f.name: f.default for f in fields(Slot) if f.compare}


def _row(slot: Slot, chunk: int, antecedents: Sequence[int]) -> dict[str, Any]:
    """A slot; fields at their defaults are left out."""
    row = {name: getattr(slot, name) for name in _DEFAULTS if getattr(slot, name) != _DEFAULTS[name]}
    row |= {"chunk_id": chunk, "antecedents": antecedents}
    return row


def _slot(row: Mapping[str, Any], ids: Sequence[str]) -> Slot:
    values = {
        "chunk_id": ids[row["chunk_id"]],
        "antecedents": tuple(ids[i] for i in row["antecedents"]),
    }
    slot = Slot(**{**row, **values})
    if not all(type(n) is int and n >= 0 for n in (slot.start, slot.length, slot.number)):
        raise ValueError("a slot's numbers are no whole numbers")
    return slot


def _event(document: Mapping[str, Any]) -> Event:
    ids = document["ids"]
    if not all(isinstance(name, str) for name in (*ids, document["anchor"], document["operation"])):
        raise ValueError("an id is no text")
    slots = [_slot(row, ids) for row in document["slots"]]
    after, before, evicted = (
        tuple(slots[i] for i in document[name]) for name in ("after", "before", "evicted")
    )
    costs = {name: document["report"][name] for name in _COSTS}
    rest: dict[str, Any] = {"times": Times(*document["times"]), "notes": tuple(document["notes"]), **costs}
    head: dict[str, Any] = {"operation": document["operation"], "slots": after, "evicted": evicted}
    at = document["slot"]
    report = Report(slot=None, **head, **rest) if at is None else SlotReport(slot=slots[at], **head, **rest)
    now, later = (Spent(*counts) for counts in document["usage"])
    return Event(
        plan=None,
        report=report,
        before=before,
        outcomes=tuple(Outcome(*outcome) for outcome in document["outcomes"]),
        later=Spent(*document["later"]),
        usage=Usage(now, later),
        memory=WindowMemory(**document["memory"]),
        pictures={k: base64.b64decode(v) for k, v in document.get("pictures", {}).items()},
        texts=document.get("texts", {}),
        **{name: document[name] for name in _OWN},
    )


class Trace:
    """A listener that appends each `Event` to a file, as a JSON line of its own.

    By default a line has ids, numbers and times: no text and no picture. With
    ``content`` it has the labels, texts and small pictures of chunks, too. ``session`` names the
    conversation whose window it hears.

    Any number of windows, threads and processes may write one file. If it cannot be written, the line is lost
    with a warning; the operation never fails.
    """

    def __init__(self, path: str | os.PathLike[str], *, content: bool = False, session: str = "") -> None:
        self.path = user_path(path)
        self.content = content
        self.session = session

    def __call__(self, event: Event) -> None:
        """Write the line of an operation."""
        event = event if self.content else event.without_content()
        event = replace(event, session=self.session) if self.session else event
        data = event.to_json().encode() + b"\n"
        try:
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", 0) as file:
                file.write(data)  # whole: a short append is one write
        except OSError as error:
            logger.warning("an operation is missing from the trace: %s", error)


def read_trace(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of a trace, in order. A last line that is still being written is left out.

    Raises TraceError naming the line for a file that is not a trace, OSError if it cannot be read.
    """
    return read_events(user_path(path).read_bytes(), str(path))


def read_events(data: bytes, where: str) -> Iterator[Event]:
    """The events of a trace's ``data``, as `read_trace`; ``where`` names it in errors."""
    *lines, last = data.split(b"\n")
    for number, line in enumerate([*lines, last], start=1):
        try:
            event = Event.from_json(line)
        except ValueError:
            if number > len(lines):
                continue
            text = line.decode(errors="replace")
            shown = quote(text) if text.isprintable() else "bytes that are no text"
            raise TraceError(
                f"{where}:{number}: {shown} is not a window's operation: give a file that "
                "KameraWindow(trace=…) wrote"
            ) from None
        yield event
