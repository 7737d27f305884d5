"""Bring a session's window to a prompt, or let the plain model answer one that no window holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kamera.content import Message, ProcessedMedia, Rendered, media_items
from kamera.edits import difference, same
from kamera.engines import Engine, Spent
from kamera.errors import (
    NotRelocatable,
    NotSegmentable,
    PolicyRefused,
    SessionConflict,
    UnsafeText,
    UnsupportedBackbone,
    WindowFull,
)
from kamera.reuse import Admission, Recut, admissions_of, as_placed, discovery_of, recut, strict
from kamera.sessions.anchors import Anchors, SessionWindow
from kamera.sessions.branches import History
from kamera.sessions.engine_turns import EngineAnchors, engine_messages, show_by_engine
from kamera.sessions.layout import (
    Layout,
    anchor_ids,
    anchor_segments,
    anchor_tokens,
    cut_at,
    cuts,
    keep_head,
    last_said,
    prefix_tokens,
    question_ids,
)
from kamera.sessions.modes import Manner, choices, mode_of
from kamera.sessions.ordering import Choice, Orders, cheapest
from kamera.sessions.sampling import Options
from kamera.sessions.turn import TurnReport, turn_report
from kamera.window import Dialogue, EngineWindow, KameraWindow, cut, respond, terms_in_force


@dataclass(frozen=True, eq=False)
class State:
    """The state that a turn changes. ``ids`` are the last prompt's tokens, ``layout`` the window's.

    ``changes`` are the ids of the changes that made it, in order: answers and edits. Of two states of a
    session one goes on from the other if it has the other's last change.

    ``last`` is the turn whose history these messages are; None once edited. Of a ``borrowed`` window the
    next prompt uses only what it begins with: the rest is another conversation's, or a later turn's.

    ``ahead`` is what was prepared for the next prompt, of a state that is about to be changed.
    """

    messages: History = ()
    turn: int = 0
    ids: torch.Tensor | None = None
    layout: Layout | None = None
    window: SessionWindow | None = None
    admissions: tuple[Admission, ...] = ()
    changes: tuple[str, ...] = ()
    last: str | None = None
    borrowed: bool = False
    ahead: State | None = None

    def start_of(self, prompt: Rendered) -> tuple[State, int]:
        """This state, or what was prepared, if that has more of the prompt in place; and how many tokens."""
        ahead = self.ahead
        if ahead is None or ahead.layout is None or self.layout is None or self.borrowed:
            return self, 0
        more = prefix_tokens(ahead.layout, prompt) - prefix_tokens(self.layout, prompt)
        return (ahead, more) if more > 0 else (self, 0)

    def after_change(self, **fields: Any) -> State:
        """A state that goes on from this one, by one change."""
        return replace(self, changes=(*self.changes, secrets.token_hex(8)), **fields)

    def after_turn(self, history: History) -> State:
        """A state that goes on from this one by one turn, whose id is its last change."""
        state = self.after_change(messages=history, turn=self.turn + 1)
        return replace(state, last=state.changes[-1])

    def lend(self) -> State:
        """A new conversation, which may use what its first prompt and this one's window begin with."""
        return State(layout=self.layout, window=self.window, borrowed=True)

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
    def question(self) -> torch.Tensor:
        """The prompt's tokens behind the window's chunks, int64 ``[tokens]``."""
        assert self.layout is not None
        return question_ids(self.layout.prompt)


class Shown(NamedTuple):
    """A state whose window holds a prompt, the turn's report, and the answer if one was asked for."""

    state: State
    report: TurnReport
    answer: str | None


def show(
    old: State,
    messages: Sequence[Message],
    modes: Sequence[str],
    anchors: Anchors,
    manner: Manner,
    options: Options | None = None,
) -> Shown:
    """A state whose window holds the prompt of ``messages``; ``old`` is unchanged.

    With ``options`` the prompt is answered. The strictest of ``modes`` applies to segments after a change.
    Raises the errors of `Conversations.render` and of the window.
    """
    started = time.perf_counter()
    prompt = anchors.conversations.render(messages, tools=manner.tools)
    start, anticipated = old.start_of(prompt)
    before, window, opening = start.layout, start.window, Spent()
    anew = old.borrowed and isinstance(anchors, EngineAnchors)  # it shares by itself what prompts begin with
    if window is None or before is None or anew or anchor_ids(before.prompt) != anchor_ids(prompt):
        before = None
        window, opening = anchors.open(anchor_tokens(prompt))
    else:
        window, prompt = anchors.fork(window), prompt.cut_as(before.prompt)
    media = media_of(anchors, messages)
    if isinstance(window, EngineWindow):
        dialogue = Dialogue(question_ids(prompt), engine_messages(messages), manner.tools or ())
        orders = Orders(anchors, prompt, before, window.slots, media)
        layout, report, answer = show_by_engine(anchors, window, orders, modes, dialogue, options, started)
    else:
        given = (before, prompt, media, modes, manner.reuse, old.borrowed)
        choice, found = choose(anchors, window, *given)
        layout, report, answer = _carry_out(window, choice, opening, options, manner.reuse)
        if found is not None:
            discovery_of(anchors.backbone, anchors.store).add(found.prompt, found.cuts)
    if before is not None and old.layout is not None and not old.borrowed:
        report = replace(report, left=tokens_dropped(old.layout, layout.prompt))
    if old.ahead is not None:
        report = replace(report, anticipated=anticipated)
    made = replace(old, ids=prompt.ids, layout=layout, window=window, admissions=report.admissions)
    return Shown(replace(made, ahead=None, borrowed=False), report, answer)


def _carry_out(
    window: KameraWindow, choice: Choice, opening: Spent, options: Options | None, reuse: bool
) -> tuple[Layout, TurnReport, str | None]:
    """Run the plan of a choice, and answer with ``options``; ``opening`` prefilled the system prompt."""
    slots, (order, plan), answer = window.slots, choice[1:], None
    admissions = admissions_of(window, plan, order.recurring) if reuse else ()
    if options is None:
        report = window.run(plan)
    else:
        said, report = respond(window, question_ids(order.layout.prompt), plan, **options)
        answer = str(said)
    admissions = as_placed(admissions, plan, window.slots) if reuse else ()
    tokens, mode = order.layout.prompt.num_tokens, mode_of(choice.on_leave)
    return order.layout, turn_report(slots, report, window, opening, tokens, mode, admissions), answer


UNCACHEABLE = (NotSegmentable, UnsafeText, WindowFull, NotRelocatable, PolicyRefused, UnsupportedBackbone)
"""Errors for prompts that the model itself accepts, and for a model of which no KV can be used again."""


def answer_plainly(
    backbone: Engine, inputs: Mapping[str, torch.Tensor], reason: Exception, **options: Any
) -> tuple[str, TurnReport]:
    """The plain model's answer to a whole prompt that no window holds; the report is of both together."""
    started = time.perf_counter()
    with backbone.measure() as work:
        tokens = backbone.plain.generate(inputs, **options)[0]
    report = TurnReport(
        prefilled=int(inputs["input_ids"].shape[1]),
        forwards=work.forwards,
        tokens_recomputed=work.tokens,
        vision_encodes=work.vision_encodes,
        seconds=time.perf_counter() - started,
        guarantee="exact",
        mode="forget",
        uncached=f"{type(reason).__name__}: {reason}",
    )
    return backbone.builder.detokenize(tokens) or "", report


def choose(
    anchors: Anchors,
    window: KameraWindow,
    before: Layout | None,
    prompt: Rendered,
    media: Mapping[str, ProcessedMedia],
    modes: Sequence[str],
    reuse: bool,
    borrowed: bool = False,
) -> tuple[Choice, Recut | None]:
    """The cheapest way from the layout ``before`` of a window to a prompt with this ``media``, by digest.

    With what of it came before, if that was looked for. The window's texts are cut where the prompt changes
    their inside. Of a ``borrowed`` window only what the prompt begins with stays. Raises WindowFull and
    PolicyRefused.
    """
    served = terms_in_force(window).served
    policy = strict(served) if reuse else served
    found = _cut_anew(anchors, prompt, before) if reuse and policy.moves else None
    prompt = prompt if found is None else found.rendered
    if before is not None:
        before = keep_head(window, before, prompt) if borrowed else _cut_to(window, before, prompt)
    _check_length(anchors, prompt, media)
    again = () if found is None else found.again
    apart, samples = stands_apart(window, reuse), served.samples
    orders = Orders(anchors, prompt, before, window.slots, media, again, apart, samples)
    among = choices(modes, served.minimum, reuse)
    return cheapest(window, among, orders, policy), found


def stands_apart(window: KameraWindow, reuse: bool) -> bool:
    """Whether each segment is a chunk of its own, since others look for it or its patches are formed."""
    return reuse or terms_in_force(window).served.forms == "always"


def _cut_anew(anchors: Anchors, prompt: Rendered, before: Layout | None) -> Recut:
    """The prompt cut where parts of it came before in any conversation on the store.

    Segments that the window has, the system prompt, and the last answer, whose KV may be at hand, stay.
    """
    first = anchor_segments(prompt)
    start = prompt.segments[first].start if first < len(prompt.segments) else prompt.stable
    own = () if before is None else before.prompt.segment_ids()
    discovery = discovery_of(anchors.backbone, anchors.store)
    return recut(prompt, discovery, start, {*own, *last_said(prompt)})


def media_of(anchors: Anchors, messages: Sequence[Message]) -> dict[str, ProcessedMedia]:
    """The pictures and clips of messages, by digest."""
    return {m.digest: m for m in map(anchors.conversations.media, media_items(messages))}


def _cut_to(window: KameraWindow, before: Layout, prompt: Rendered) -> Layout:
    """Cut the window's texts where ``prompt`` changes their inside; the layout of its slots then.

    Not of a window that serves no survivors: there the part behind the change is prefilled anyway, and the
    one before it is the head of a new text.
    """
    if not terms_in_force(window).served.keeps("survivor"):
        return before
    for slot, at in reversed(cuts(before, prompt).items()):
        if len(cut(window, slot, at)) > 1:
            before = cut_at(before, slot, at)
    return before


def _check_length(anchors: Anchors, prompt: Rendered, media: Mapping[str, ProcessedMedia]) -> None:
    """Raise WindowFull for a prompt with more positions than the model was made for."""
    backbone = anchors.backbone
    limit = backbone.limits.trained
    if limit is None or prompt.num_tokens <= limit:  # no axis has more positions than there are tokens
        return
    shown = [media[s.media].inputs for s in prompt.segments if s.media is not None]
    names = [n for n in (shown[0] if shown else ()) if n in set(backbone.builder.accepted)]
    joined = {name: torch.cat([one[name] for one in shown]) for name in names}
    whole = backbone.chunk_from_tensors(prompt.ids, label="prompt", **joined)
    used = int(backbone.positions([prompt.ids], [whole.position_inputs()]).max()) + 1
    if used > limit:
        raise WindowFull(
            f"the prompt has {used} positions, this model {limit}: remove messages, or give the session an "
            "edit policy that does"
        )


def tokens_dropped(before: Layout, prompt: Rendered) -> int:
    """Tokens of the window's segments that the prompt no longer has."""
    held = {i for start, stop in before.runs for i in range(start, stop)}
    gone = difference(before.prompt, prompt).removed
    return sum(before.prompt.segments[i].num_tokens for i in gone if i in held)
