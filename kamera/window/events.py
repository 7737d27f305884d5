"""Events that a window sends to its listeners, one for each operation; a trace is a file of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from kamera.engines import Usage
from kamera.window.memory import WindowMemory
from kamera.window.report import Report
from kamera.window.slots import Slot
from kamera.window.steps import Cost, Place, Plan, Prefill, Reason, Sample

logger = logging.getLogger(__name__)

How = Literal["kept", "moved", "stored", "patched", "sampled", "prefilled"]
"""What an operation did with a chunk.

It stays as it is, or at another place; it is served from its stored canonical, or from that and a patch; some
of its tokens ran, or all whose KV was not at hand.
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
    entry for each of these. ``later`` is the planned cost of what it leaves for later work, ``usage`` the
    account of the window so far, ``memory`` the bytes that it holds, those of forks included, and
    ``cached`` those of objects in the memory of its store.

    ``pictures`` are small JPEG files of chunks that came by it, by chunk id, as far as their pictures are at
    hand, and ``texts`` the beginnings of what they say. ``plan`` is the plan that ran: None for `form_orbit`,
    which plans nothing, and out of a trace, which holds no plans (`Plan.to_json` writes them).
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
    later: Cost = field(default_factory=Cost)
    session: str = ""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def placed(self) -> int:
        """Index of the first chunk that is placed anew; chunks that merely survive do not count.

        Each chunk from there on needed a patch for those before it.
        """
        before, after = self.before, self.report.slots
        if self.operation in ("append", "recall"):
            here = {slot.number for slot in before}
            return len(after) - (after[-1].number not in here)  # a recall of a chunk in view moves nothing
        if self.operation in ("reorder", "assemble"):
            stayed = (old.number == new.number for old, new in zip(before, after, strict=False))
            return next((i for i, same in enumerate(stayed) if not same), min(len(before), len(after)))
        return len(after)

    def without_content(self) -> Event:
        """The same event without texts, pictures, and sketches of questions: ids, numbers and times."""
        slots = {id(slot): _bare(slot) for slot in (*self.before, *self.report.slots, *self.report.evicted)}
        report, slot = self.report, self.report.slot
        report = replace(
            report,
            slot=slot and _bare(slot),
            slots=tuple(slots[id(slot)] for slot in report.slots),
            evicted=tuple(slots[id(slot)] for slot in report.evicted),
        )
        return replace(
            self, report=report, before=tuple(slots[id(slot)] for slot in self.before), pictures={}, texts={}
        )

    def to_json(self) -> str:
        """The event as one line of JSON, without its plan."""
        from kamera.window.event_json import event_to_json

        return event_to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Event:
        """An event out of `to_json`. Raises ValueError for anything else."""
        from kamera.window.event_json import event_from_json

        return event_from_json(text)


Listener = Callable[[Event], object]


def tell(listeners: tuple[Listener, ...], event: Event) -> None:
    """Call each listener; an error in one is logged as a warning and never fails the operation."""
    for listener in listeners:
        try:
            listener(event)
        except Exception as error:
            logger.warning("an event of %s was not heard: %s", event.operation, error)


def outcomes(
    plan: Plan, before: Sequence[Slot], after: Sequence[Slot], media: Sequence[bool]
) -> tuple[Outcome, ...]:
    """What a plan did with each slot of ``after``; ``media`` says which of them have pictures."""
    steps = {s.seat.number: s for s in plan.steps if isinstance(s, Place | Prefill | Sample)}
    places = {slot.number: slot.position for slot in before}
    found: list[Outcome] = []
    for slot, seen in zip(after, media, strict=True):
        match steps.get(slot.number):
            case Place(patch=patch, computes=computes):
                how: How = "patched" if patch else "prefilled" if computes else "stored"
                why: Reason = "no canonical" if computes else ""
                found.append(Outcome(how, slot.length * computes, why, patch.bytes if patch else 0, seen))
            case Prefill() as step:
                found.append(Outcome("prefilled", slot.length - step.held, step.reason, media=seen))
            case Sample() as step:
                found.append(Outcome("sampled", step.size.tokens, step.reason, media=seen))
            case _:
                stays = places.get(slot.number) == slot.position
                found.append(Outcome("kept" if stays else "moved", media=seen))
    return tuple(found)


def _bare(slot: Slot) -> Slot:
    proof = slot.proof and replace(slot.proof, asked=())
    return replace(slot, label="", proof=proof)
