"""Functions that take a window, for what few ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from kamera.content import Encoded
from kamera.engines import Recipe
from kamera.errors import quote
from kamera.ops import CodedKV, kv_copy, kv_slice
from kamera.patches import Copy, Facts, Former, form_orbit, later_of
from kamera.trust import ReusePolicy
from kamera.window.asking import Inquiry, Question, Response, TokenSequence, sequence_behind
from kamera.window.contents import one_at_a_time
from kamera.window.engine_window import EngineWindow
from kamera.window.recipe import recipe_of, store_state
from kamera.window.report import SlotReport, Tally
from kamera.window.requests import Request
from kamera.window.seats import Seat, Seats, new_number
from kamera.window.stage import Stage
from kamera.window.state import Resident, ShownSpan, Slot, WindowState, shift
from kamera.window.steps import Plan
from kamera.window.window import KameraWindow


def sequence_of(window: KameraWindow) -> TokenSequence:
    """The token sequence of a window, its system prompt included."""
    stage, state = window._stage, window._state
    none = stage.former.anchor.input_ids[:0]
    ids, positions = sequence_behind(stage, state, none)
    return TokenSequence(ids, shift(positions, [-f for f in state.seats.frame]))


def former_of(window: KameraWindow) -> Former:
    """The `Former` of a window: its ``backbone``, its ``store``, its ``anchor`` (the system prompt), …."""
    return window._stage.former


def policy_in_force(window: KameraWindow | EngineWindow) -> ReusePolicy:
    """The policy of a window."""
    return window._policy if isinstance(window, KameraWindow) else window.policy


@one_at_a_time
def shown_spans(window: KameraWindow) -> tuple[ShownSpan, ...]:
    """The anchor and each slot as the live cache shows them, in order."""
    window._check_backbone()
    stage, state = window._stage, window._state
    stage.show(state, Tally())
    anchor = stage.former.anchor
    parts = [(Encoded(anchor.input_ids, {}, {}), shift(anchor.positions, state.seats.frame))]
    parts += zip([facts.encoded for facts in state.facts], state.positions, strict=True)
    return tuple(
        ShownSpan(encoded, positions, kv_copy(stage.live.read(i)))
        for i, (encoded, positions) in enumerate(parts)
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
    borders = [*pairwise([0, *at, resident.facts.length])]
    if any(start >= stop for start, stop in borders):
        raise ValueError(f"at {quote(at)} are no ascending tokens inside of {resident.facts.length}")
    if not _is_plain(seat, resident):
        return (window.slots[index],)
    label, parts = resident.facts.label, list[Facts]()
    for start, stop in borders:
        ids = resident.facts.encoded.input_ids[start:stop]
        chunk = window._backbone.chunk_from_tensors(ids, label=label)
        parts.append(Facts(chunk.id, Encoded(ids, {}, {}), label))
    window._state, window._plans = _cut(state, index, parts, window._stage), ()
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

    Canonicals and the anchor are stored as always, and KV that was run in this window (prefilled or sampled
    behind antecedents, survivors included) by its content. No forward runs. Raises StoreError.
    """
    window._check_backbone()
    later_of(window._backbone).flush()
    window._state, window._plans = store_state(window._stage.former, window._state), ()
    return recipe_of(window._stage.former, window._state)


@one_at_a_time
def keep_orbit(
    window: KameraWindow, slot: Slot | int, *, samples: int | None = None, seed: int = 0
) -> SlotReport:
    """Form and store the orbit patch of a chunk over orderings of the chunks before it.

    By default over a small balanced set of orderings; ``samples`` asks for more, or fewer (`orderings`). The
    window itself does not change.
    """
    index, chunks = window._state.index(slot), window._state.facts
    with window._counting() as tally:
        form_orbit(window._stage.former, chunks[index], chunks[:index], samples=samples, seed=seed)
    report = tally.report("keep_orbit", window.slots[index], window.slots)
    window._emit(None, report, window.slots, {})
    assert isinstance(report, SlotReport)
    return report


@one_at_a_time
def next_token_logits_of(window: KameraWindow, questions: Sequence[Question]) -> torch.Tensor:
    """Logits ``[questions, vocabulary]`` of each answer's first token; the questions share forwards."""
    window._check_backbone()
    return window._asker().logits_of(questions)


@one_at_a_time
def answer_of(window: KameraWindow, question: Question, *, max_new_tokens: int) -> torch.Tensor:
    """Token ids ``[new]`` of the likeliest answer, of at most so many tokens."""
    window._check_backbone()
    return window._asker().answer_ids(question, max_new_tokens=max_new_tokens, do_sample=False)[0]


@one_at_a_time
def logits_of_answers(
    window: KameraWindow, asked: Sequence[tuple[Question, torch.Tensor]]
) -> list[torch.Tensor]:
    """Logits ``[tokens, vocabulary]`` of the tokens of each answer, for questions and answers."""
    window._check_backbone()
    return window._asker().logits_of_answers(asked)


@one_at_a_time
def respond(window: KameraWindow, /, question: Question, request: Request | Plan, **options: Any) -> Response:
    """Run a request or a plan, and answer a question behind it; new chunks share its forward.

    The next text at the tail that begins with question and answer takes over their KV. ``options`` as for
    `generate`, of one sequence. An error leaves the window as it was. Raises the errors of `run` and
    `generate`.
    """
    backbone = window._backbone
    backbone.check_sampling(options)
    if (several := options.get("num_return_sequences")) not in (None, 1):
        raise ValueError(f"num_return_sequences={several}: a response is one answer")
    ids = window._asker().question_ids(question)
    report, rows = window._answer(request, Inquiry(ids, options))
    assert rows is not None, "an inquiry is answered"
    window._audit_one()
    text = backbone.builder.detokenize(rows[0])
    return Response(rows[0] if text is None else text, report)


def _is_plain(seat: Seat, resident: Resident) -> bool:
    """True for a text that shows the KV of its prefill."""
    facts, copy, source = resident.facts, resident.copy, seat.source
    is_text = not (facts.encoded.tensors or facts.position_inputs or source.home.shape)
    is_prefilled = copy.patch is None and seat.clean is None and not source.canonical
    return is_text and is_prefilled and not isinstance(copy.kv, CodedKV)


def _cut(state: WindowState, index: int, facts: Sequence[Facts], stage: Stage) -> WindowState:
    """The state with a text in parts, each prefilled behind those before it."""
    row, copy, start = state.seats.seats, state.residents[index].copy, 0
    seat, parts, tensors = row[index], list[Seat](), dict(state.tensors)
    antecedents = seat.source.antecedents
    for part in facts:
        stop = start + part.length
        places = copy.positions[:, start:stop]
        home = stage.spots.spot(part, places)
        source = replace(seat.source, home=home, antecedents=antecedents, behind=seat.source.behind + start)
        new = replace(
            seat,
            chunk_id=part.chunk_id,
            length=part.length,
            spot=home.shift(seat.offset),
            source=source,
            archived=False,
            number=new_number(),
        )
        parts.append(new)
        tensors[new.number] = Resident(part, Copy(stage.live.hold(kv_slice(copy.kv, start, stop)), places))
        antecedents, start = (*antecedents, part.chunk_id), stop
    part_ids = [part.chunk_id for part in facts]
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
