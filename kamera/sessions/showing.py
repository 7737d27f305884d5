"""Bringing a session's window to a prompt."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kamera.content import Chunk, Conversations, Message, Rendered, media_items
from kamera.edits import difference, same
from kamera.errors import SessionConflict, WindowFull
from kamera.reuse import Admission, Arrangement, Calibration, calibration_of, strict
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, Piece, Run, anchor_ids, anchor_segments, laid_out, question_ids
from kamera.sessions.modes import applied, cheapest, choices
from kamera.sessions.timers import Timer
from kamera.sessions.turn import TurnReport, turn_report
from kamera.window import KameraWindow, OnLeave, Plan, Report, Slot

Options = Mapping[str, Any]
"""Options of an answer."""

Reuse = bool | Calibration | str | Path
"""The switch of reuse; a calibration, or its file, switches it on and admits approximate segments."""

Inputs = Mapping[str, torch.Tensor]
"""A picture's own model inputs."""


@dataclass(frozen=True, eq=False)
class State:
    """The state that a turn changes. ``ids`` are the last prompt's tokens, ``layout`` the window's.

    ``changes`` are the ids of the changes that made it, in order: answers, edits, timers. Of two states of a
    session one goes on from the other if it has the other's last change.
    """

    messages: tuple[dict[str, Any], ...] = ()
    turn: int = 0
    ids: torch.Tensor | None = None
    layout: Layout | None = None
    window: KameraWindow | None = None
    admissions: tuple[Admission, ...] = ()
    timers: tuple[Timer, ...] = ()
    changes: tuple[str, ...] = ()

    def changed(self, **fields: Any) -> State:
        """A state that goes on from this one, by one change."""
        return replace(self, changes=(*self.changes, secrets.token_hex(8)), **fields)

    def check_seen(self, seen: State, history: Sequence[Message] = ()) -> None:
        """Raise SessionConflict if this went on from ``seen``, and ``history`` does not begin with that."""
        count = len(self.messages)
        if self.changes == seen.changes or (count and same(history[:count], self.messages)):
            return
        raise SessionConflict(
            f"another thread changed this session meanwhile, it has {count} messages now: look at "
            "session.messages and ask again, or send the new messages alone (append=True)"
        )

    @property
    def asked(self) -> KameraWindow:
        """The window, of a state that has one."""
        assert self.window is not None
        return self.window

    @property
    def question(self) -> torch.Tensor:
        """The prompt's tokens behind the window's chunks, int64 ``[tokens]``."""
        assert self.layout is not None
        return question_ids(self.layout.prompt)


class Admitting(NamedTuple):
    """Whether segments are admitted by tier, and the calibration of approximate ones."""

    on: bool
    calibration: Calibration | None

    @classmethod
    def of(cls, reuse: Reuse) -> Admitting:
        """As the switch says; raises the errors of a calibration's file."""
        return cls(bool(reuse), None if isinstance(reuse, bool) else calibration_of(reuse))


class Shown(NamedTuple):
    """A state whose window holds a prompt, the turn's report, and the answer if one was asked for."""

    state: State
    report: TurnReport
    answer: str | None


def shown(
    old: State,
    shaped: Sequence[Message],
    modes: Sequence[str],
    anchors: Anchors,
    conversations: Conversations,
    tools: Sequence[Any] | None,
    admitting: Admitting,
    options: Options | None = None,
) -> Shown:
    """A state whose window holds the prompt of ``shaped``; ``old`` is unchanged.

    With ``options`` the prompt is answered, unless approximate segments are probed first. The strictest of
    ``modes`` applies to segments after a change. Raises the errors of `Conversations.render` and of the
    window.
    """
    prompt = conversations.render(shaped, tools=tools)
    before = old.layout
    if old.window is None or before is None or anchor_ids(before.prompt) != anchor_ids(prompt):
        before, first = None, anchor_segments(prompt)
        stop = prompt.segments[first - 1].stop if first else 0
        window, anchor = anchors.open(prompt.ids[:stop]), 0
    else:
        window = anchors.fork(old.window)
        anchor = window.anchor.length
    slots = window.slots
    media = {m.digest: m.inputs for m in map(conversations.media, media_items(shaped))}
    _check_length(anchors, prompt, media)
    made: dict[Run, Chunk] = {}
    pieces: dict[OnLeave, list[Piece]] = {}

    def order_of(on_leave: OnLeave) -> list[Slot | Chunk]:
        pieces[on_leave] = laid_out(prompt, before, join=on_leave == "exact")
        for run in (run for run, slot in pieces[on_leave] if slot is None and run not in made):
            made[run] = _chunk(anchors, prompt, run, media)
        return [made[run] if slot is None else slots[slot] for run, slot in pieces[on_leave]]

    policy = strict(window.policy) if admitting.on else window.policy
    on_leave, plan = cheapest(window, choices(modes, window, admitting.on), order_of, policy)
    question = question_ids(prompt)
    if admitting.on:
        arrangement = Arrangement(
            window, order_of(on_leave), on_leave=on_leave, calibration=admitting.calibration, plan=plan
        )
        report, admissions, answer = arrangement.run(question, options)
    else:
        report, answer = _arranged(window, plan, question, options)
        admissions = ()
    layout = Layout(prompt, tuple(run for run, _ in pieces[on_leave]))
    left = 0 if before is None else _left(before, prompt)
    total = turn_report(slots, report, anchor, prompt.num_tokens, left, window.guarantee, applied(on_leave))
    state = replace(old, ids=prompt.ids, layout=layout, window=window, admissions=admissions)
    return Shown(state, total, answer)


def _arranged(
    window: KameraWindow, plan: Plan, question: torch.Tensor, options: Options | None
) -> tuple[Report, str | None]:
    if options is None:
        return window.run(plan), None
    answer, report = window.respond(question, plan, **options)
    return report, str(answer)


def _chunk(
    anchors: Anchors, prompt: Rendered, run: Run, media: Mapping[str, Mapping[str, torch.Tensor]]
) -> Chunk:
    first, last = prompt.segments[run[0]], prompt.segments[run[1] - 1]
    inputs = {} if first.media is None else dict(media[first.media])
    accepted = set(anchors.backbone.accepted)
    given = {name: value for name, value in inputs.items() if name in accepted}
    ids = prompt.ids[first.start : last.stop]
    return anchors.backbone.chunk_from_tensors(ids, label=first.role, **given)


def _check_length(
    anchors: Anchors, prompt: Rendered, media: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Raise WindowFull for a prompt with more positions than the model was made for."""
    backbone = anchors.backbone
    limit = backbone.limits.trained
    if limit is None or prompt.num_tokens <= limit:  # no axis has more positions than there are tokens
        return
    shown = [media[s.media] for s in prompt.segments if s.media is not None]
    names = [n for n in (shown[0] if shown else ()) if n in set(backbone.accepted)]
    joined = {name: torch.cat([one[name] for one in shown]) for name in names}
    whole = backbone.chunk_from_tensors(prompt.ids, label="prompt", **joined)
    used = int(backbone.positions([prompt.ids], [whole.position_inputs()]).max()) + 1
    if used > limit:
        raise WindowFull(
            f"the prompt has {used} positions, this model {limit}: remove messages, or give the session an "
            "edit policy that does"
        )


def _left(before: Layout, prompt: Rendered) -> int:
    """Tokens of the window's segments that the prompt no longer has."""
    held = {i for start, stop in before.runs for i in range(start, stop)}
    gone = difference(before.prompt, prompt).removed
    return sum(before.prompt.segments[i].num_tokens for i in gone if i in held)
