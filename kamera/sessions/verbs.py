"""Verbs of `kamera.edits` on a session: what becomes of the stored objects of a span's chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kamera.edits import Directive, Evict, Pin, Share, Span, Verb, resolve
from kamera.errors import IncompatibleChunk, InvalidDirective
from kamera.sessions.anchors import Anchors
from kamera.sessions.turn import TurnReport
from kamera.store import ChunkStore, StoreAdmin
from kamera.window import KameraWindow, Slot

if TYPE_CHECKING:
    from kamera.sessions.chat import ChatSession


@dataclass(frozen=True)
class VerbReport:
    """The chunks that a verb concerned, the number of stored objects, and of an eviction its turn.

    ``forwards``: of canonicals that had to be computed before they could be stored.
    """

    chunks: tuple[str, ...]
    objects: int = 0
    forwards: int = 0
    turn: TurnReport | None = None


def applied_verb(session: ChatSession, anchors: Anchors, verb: Verb) -> VerbReport:
    """Apply ``verb`` to a session; see `ChatSession.apply`, which runs the edit of an eviction."""
    slots = _slots(session, verb)
    if isinstance(verb, Evict):
        return VerbReport(tuple(slot.chunk_id for slot in slots))
    window = session.state.asked
    if isinstance(verb, Share) and verb.scope is not None:
        _check_scope(session.store, verb.scope)
    chunks = tuple(dict.fromkeys(slot.chunk_id for slot in slots))
    forwards = _archived(anchors, window, slots)
    window.flush()  # a verb is about all of the chunks that is to be stored
    if isinstance(verb, Share):
        return VerbReport(chunks, _shared(window, chunks, verb.scope), forwards)
    admin = StoreAdmin(session.store)
    keys = [info.key for chunk in chunks for info in session.store.ls(chunk_id=chunk)]
    if isinstance(verb, Pin):
        admin.pin(keys, verb.ttl)
        return VerbReport(chunks, len(keys), forwards)
    return VerbReport(chunks, admin.objects.demote(keys), forwards)


def _slots(session: ChatSession, span: Span) -> list[Slot]:
    """The window's slots that hold the span. Raises InvalidDirective if there are none."""
    layout, window = session.state.layout, session.state.window
    if layout is None or window is None:
        raise InvalidDirective("the session has no prompt yet: send messages first")
    rendered = session.rendered()
    directive = Directive(span.start, span.end, unit=span.unit)
    (edit,) = resolve([directive], rendered, lambda text: (), snap="widen")
    parts = rendered.cut_as(layout.prompt).segments
    named = {s.id for s in parts if s.start < edit.stop and edit.start < s.stop}
    held = [layout.prompt.segments[start:stop] for start, stop in layout.runs]
    slots = [slot for slot, run in zip(window.slots, held, strict=True) if named & {s.id for s in run}]
    if not slots:
        raise InvalidDirective(
            f"{span.unit} {span.start}:{span.end} are not in the window: they are the system prompt, or new "
            "since the last prompt, or an edit policy left them out"
        )
    return slots


def _archived(anchors: Anchors, window: KameraWindow, slots: Iterable[Slot]) -> int:
    """Store the canonicals of slots that have none yet; the number of forwards for that."""
    branch = anchors.fork(window)  # the clean view of a branch needs the canonical, and archives it
    return sum(branch.condition(slot, False).forwards for slot in slots)


def _check_scope(own: ChunkStore, scope: ChunkStore) -> None:
    if scope.kv != own.kv:
        raise IncompatibleChunk(
            f"a store with kv={scope.kv!r} cannot take chunks of one with kv={own.kv!r}: open it with "
            f"kv={own.kv!r}"
        )


def _shared(window: KameraWindow, chunks: Iterable[str], scope: ChunkStore | None) -> int:
    """Put the chunks' encodings and canonicals into ``scope``; the number of objects that it now has."""
    store, count = window.store, 0
    for chunk in chunks:
        canonical = store.get_canonical(window.context, chunk)
        encoding = store.get_encoding(canonical.vision, chunk) if canonical and canonical.vision else None
        for record in (encoding, canonical):
            if record is None:
                continue
            count += 1
            if scope is not None:
                scope.put(replace(record, context=replace(record.context, tenant=scope.tenant)))
    return count
