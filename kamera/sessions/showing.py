"""Bring a session's window to a prompt, or let the plain model answer one that no window holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kamera.content import Message, Rendered, Segment
from kamera.edits import Directive, difference, same
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
from kamera.reuse import Admission, Recut, admissions_after_run, admissions_of, discovery_of, recut
from kamera.sessions.anchors import Anchors, History
from kamera.sessions.engine_turns import EngineAnchors, engine_messages, show_by_engine
from kamera.sessions.layout import (
    Layout,
    Manner,
    SessionWindow,
    Stretch,
    anchor_ids,
    anchor_tokens,
    choices,
    count_anchor_segments,
    cut_at,
    cuts,
    keep_head,
    last_answer_ids,
    mode_of,
    prefix_tokens,
    question_ids,
)
from kamera.sessions.ordering import Choice, Orders, cheapest
from kamera.sessions.stream import Options, TurnReport, turn_report
from kamera.window import Dialogue, EngineWindow, KameraWindow, cut_text, respond


@dataclass(frozen=True, eq=False)
class State(Stretch):
    """The state that a turn changes. ``ids`` are the last prompt's tokens.

    ``changes`` are the ids of the changes that made it, in order: answers and edits. Of two states of a
    session one goes on from the other if it has the other's last change.

    ``last`` is the turn whose history these messages are; None once edited. ``decays`` are directives on
    these messages whose time comes (`kamera.edits.decay`).

    ``next_state`` is what was prepared for the next prompt, of a state that is about to be changed.
    """

    messages: History = ()
    turn: int = 0
    ids: torch.Tensor | None = None
    admissions: tuple[Admission, ...] = ()
    changes: tuple[str, ...] = ()
    last: str | None = None
    decays: tuple[Directive, ...] = ()
    next_state: State | None = None

    def start_of(self, prompt: Rendered) -> tuple[State, int]:
        """This state, or what was prepared, if that has more of the prompt in place; and how many tokens."""
        next_state = self.next_state
        if next_state is None or next_state.layout is None or self.layout is None:
            return self, 0
        more = prefix_tokens(next_state.layout, prompt) - prefix_tokens(self.layout, prompt)
        return (next_state, more) if more > 0 else (self, 0)

    def after_change(self, **fields: Any) -> State:
        """A state that goes on from this one, by one change."""
        return replace(self, changes=(*self.changes, secrets.token_hex(8)), **fields)

    def after_turn(self, history: History) -> State:
        """A state that goes on from this one by one turn, whose id is its last change."""
        state = self.after_change(messages=history, turn=self.turn + 1)
        return replace(state, last=state.changes[-1])

    def check_seen(self, old_state: State, history: Sequence[Message] = ()) -> None:
        """Raise SessionConflict if this went on from ``old_state``, and ``history`` begins otherwise."""
        count = len(self.messages)
        if self.changes == old_state.changes or (count and same(history[:count], self.messages)):
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
    start_time = time.perf_counter()
    prompt = manner.render(anchors.conversations, messages)
    if not isinstance(anchors, EngineAnchors):
        _check_length(anchors, prompt)
    start, anticipated = old.start_of(prompt)
    is_own = start.layout is not None and anchor_ids(start.layout.prompt) == anchor_ids(prompt)
    base = start if is_own else Stretch()
    window: SessionWindow
    if isinstance(anchors, EngineAnchors):
        parts = (anchors, base, prompt, engine_messages(messages), manner, modes, options, start_time)
        window, layout, report, answer = _show_by_engine(*parts)
    else:
        way = _cheapest_way(anchors, base, prompt, modes, manner.reuse)
        window, (layout, report, answer) = way.window, _carry_out(way, options, manner.reuse)
        if way.recut is not None:
            discovery_of(anchors.backbone, anchors.store).add(way.recut.prompt, way.recut.cuts)
    if is_own and old.layout is not None:
        report = replace(report, left=count_dropped_tokens(old.layout, layout.prompt))
    if old.next_state is not None:
        report = replace(report, anticipated=anticipated)
    state = replace(old, layout=layout, window=window, spoken=None, next_state=None)
    return Shown(replace(state, ids=layout.prompt.ids, admissions=report.admissions), report, answer)


class Way(NamedTuple):
    """A window and what is to be done to it; what of the prompt was cut anew, and the work of opening it."""

    window: KameraWindow
    choice: Choice
    recut: Recut | None
    opening: Spent


def _cheapest_way(
    anchors: Anchors,
    base: Stretch,
    prompt: Rendered,
    modes: Sequence[str],
    reuse: bool,
) -> Way:
    """From a session's own window, from a new one, or from any that has more of the prompt's beginning.

    Never more tokens run than a prefix cache of all these windows would run.
    """
    head, shared_tokens = anchors.trail.best(prompt, but=base)
    way = None
    if isinstance(base.window, KameraWindow) and base.layout is not None:
        window = anchors.fork(base.window)
        own_prompt = prompt.cut_as(base.layout.prompt)
        treatment = choose_treatment(anchors, window, base.layout, own_prompt, modes, reuse)
        way = Way(window, *treatment, Spent())
        run_tokens = way.choice.plan.cost.tokens + len(question_ids(prompt))
        if prompt.num_tokens - shared_tokens >= run_tokens:
            return way
    if head is not None and isinstance(head.window, KameraWindow) and head.layout is not None:
        window = anchors.fork(head.window)
        own_prompt = prompt.cut_as(head.layout.prompt)
        layout = keep_head(window, head.layout, own_prompt)
        treatment = choose_treatment(anchors, window, layout, own_prompt, modes, reuse)
        return Way(window, *treatment, Spent())
    if way is not None:
        return way
    new_window, opening = anchors.open(anchor_tokens(prompt))
    assert isinstance(new_window, KameraWindow), "no engine's"
    return Way(new_window, *choose_treatment(anchors, new_window, None, prompt, modes, reuse), opening)


def _show_by_engine(
    anchors: EngineAnchors,
    base: Stretch,
    prompt: Rendered,
    history: tuple[dict[str, Any], ...],
    manner: Manner,
    modes: Sequence[str],
    options: Options | None,
    start_time: float,
) -> tuple[EngineWindow, Layout, TurnReport, str | None]:
    """The prompt by an engine's window, which shares by itself what prompts begin with."""
    if isinstance(base.window, EngineWindow) and base.layout is not None:
        window, prompt = anchors.fork(base.window), prompt.cut_as(base.layout.prompt)
    else:
        window, _ = anchors.open(anchor_tokens(prompt))
    dialogue = Dialogue(question_ids(prompt), history, manner.tools or ())
    # a run of several texts is no chunk of another prompt: what leaves may be one of them
    orders = Orders(anchors, prompt, base.layout, window.slots, keeps_apart=True)
    return (window, *show_by_engine(anchors, window, orders, modes, dialogue, options, start_time))


def spoken_ids(state: State, answer: Sequence[int]) -> torch.Tensor | None:
    """What a window has said behind its chunks once it has answered so: of the last token it has no KV."""
    if state.layout is None or not answer or not isinstance(state.window, KameraWindow):
        return None
    return torch.cat([state.question, torch.tensor(answer[:-1], dtype=torch.int64)])


def _carry_out(way: Way, options: Options | None, reuse: bool) -> tuple[Layout, TurnReport, str | None]:
    """Run the plan of a way, and answer with ``options``."""
    window, (on_leave, order, plan), _, opening = way
    slots, answer = window.slots, None
    admissions = admissions_of(window, plan, order.recurring) if reuse else ()
    if options is None:
        report = window.run(plan)
    else:
        response, report = respond(window, question_ids(order.layout.prompt), plan, **options)
        answer = str(response)
    admissions = admissions_after_run(admissions, plan, window.slots) if reuse else ()
    tokens, mode = order.layout.prompt.num_tokens, mode_of(on_leave)
    told = turn_report(slots, report, window, opening, tokens, mode, admissions)
    if mode == "amortize" and told.guarantee == "exact":  # nothing in view knows what has left
        told = replace(told, mode="forget")
    return order.layout, told, answer


UNCACHEABLE = (NotSegmentable, UnsafeText, WindowFull, NotRelocatable, PolicyRefused, UnsupportedBackbone)
"""Errors for prompts that the model itself accepts, and for a model of which no KV can be used again."""


def answer_plainly(
    backbone: Engine, inputs: Mapping[str, torch.Tensor], reason: Exception, **options: Any
) -> tuple[str, TurnReport]:
    """The plain model's answer to a whole prompt that no window holds; the report is of both together."""
    start_time = time.perf_counter()
    with backbone.measure() as work:
        tokens = backbone.plain.generate(inputs, **options)[0]
    report = TurnReport(
        prefilled=int(inputs["input_ids"].shape[1]),
        forwards=work.forwards,
        tokens_recomputed=work.tokens,
        vision_encodes=work.vision_encodes,
        seconds=time.perf_counter() - start_time,
        guarantee="exact",
        mode="forget",
        uncached=f"{type(reason).__name__}: {reason}",
    )
    return backbone.builder.detokenize(tokens) or "", report


def choose_treatment(
    anchors: Anchors,
    window: KameraWindow,
    layout: Layout | None,
    prompt: Rendered,
    modes: Sequence[str],
    reuse: bool,
) -> tuple[Choice, Recut | None]:
    """The cheapest way from the ``layout`` of a window to a prompt.

    With what of it came before, if that was looked for. The window's texts are cut where the prompt changes
    their inside. Raises WindowFull and PolicyRefused.
    """
    policy = window.policy
    recut_prompt = _cut_anew(anchors, prompt, layout) if reuse and policy.moves else None
    prompt = prompt if recut_prompt is None else recut_prompt.rendered
    if layout is not None:
        layout = _cut_to(window, layout, prompt)
    repeats = () if recut_prompt is None else recut_prompt.again
    keeps_apart = stands_apart(window, reuse)
    orders = Orders(anchors, prompt, layout, window.slots, repeats, keeps_apart)
    treatments = choices(modes, policy.minimum, reuse)
    return cheapest(window, treatments, orders), recut_prompt


def stands_apart(window: KameraWindow, reuse: bool) -> bool:
    """Whether each segment is a chunk of its own, since others look for it or its patches are formed."""
    return reuse or window.policy.forms == "always"


def _cut_anew(anchors: Anchors, prompt: Rendered, old_layout: Layout | None) -> Recut:
    """The prompt cut where parts of it came before in any conversation on the store.

    Segments that the window has, the system prompt, and the last answer, whose KV may be at hand, stay.
    """
    first = count_anchor_segments(prompt)
    start = prompt.segments[first].start if first < len(prompt.segments) else prompt.stable
    own_ids = () if old_layout is None else old_layout.prompt.segment_ids()
    discovery = discovery_of(anchors.backbone, anchors.store)
    return recut(prompt, discovery, start, {*own_ids, *last_answer_ids(prompt)})


def _cut_to(window: KameraWindow, layout: Layout, prompt: Rendered) -> Layout:
    """Cut the window's texts where ``prompt`` changes their inside; the layout of its slots then.

    Not of a window that serves no survivors: there the part behind the change is prefilled anyway, and the
    one before it is the head of a new text.
    """
    if not window.policy.keeps("survivor"):
        return layout
    for slot, at in reversed(cuts(layout, prompt).items()):
        if len(cut_text(window, slot, at)) > 1:
            layout = cut_at(layout, slot, at)
    return layout


def _check_length(anchors: Anchors, prompt: Rendered) -> None:
    """Raise WindowFull for a prompt with more positions than the model was made for."""
    backbone = anchors.backbone
    limit = backbone.limits.trained
    if limit is None or prompt.num_tokens <= limit:  # no axis has more positions than there are tokens
        return
    count = prompt.num_tokens
    if backbone.axes > 1:
        ids = [prompt.tokens(segment) for segment in prompt.segments]
        inputs = [_position_inputs(backbone, prompt, segment) for segment in prompt.segments]
        count = int(backbone.positions([*ids, prompt.ids[prompt.stable :]], [*inputs, {}]).max()) + 1
    if count > limit:
        raise WindowFull(
            f"the prompt has {count} positions, this model {limit}: remove messages, or give the session an "
            "edit policy that does"
        )


def _position_inputs(backbone: Engine, prompt: Rendered, segment: Segment) -> Mapping[str, torch.Tensor]:
    """What determines the positions of a segment, beside its token ids."""
    accepted = set(backbone.builder.accepted)
    inputs: dict[str, Any] = {n: t for n, t in prompt.inputs(segment).items() if n in accepted}
    return backbone.chunk_from_tensors(prompt.tokens(segment), **inputs).position_inputs() if inputs else {}


def count_dropped_tokens(old_layout: Layout, prompt: Rendered) -> int:
    """Tokens of the window's segments that the prompt no longer has."""
    window_indices = {i for start, stop in old_layout.runs for i in range(start, stop)}
    removed_indices = difference(old_layout.prompt, prompt).removed
    return sum(old_layout.prompt.segments[i].num_tokens for i in removed_indices if i in window_indices)
