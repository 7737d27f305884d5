"""Questions behind a window: positions, logits and answers, without a change to the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kamera.content import Chunk, Encoded, Spoken, as_messages
from kamera.engines import Continuation
from kamera.errors import EmptyChunk, quote
from kamera.ops import kv_tokens
from kamera.patches import Copy, Facts, text_positions
from kamera.trust import prefilled_behind
from kamera.window.report import Report, Tally
from kamera.window.seats import Seat, Source, footing
from kamera.window.stage import Stage
from kamera.window.state import Resident, WindowState, shift
from kamera.window.steps import Archive, Follow, Harvest, Plan, Prefill, runs_of


@dataclass(frozen=True, eq=False)
class Inquiry:
    """A question: token ids ``[tokens]``, and options of its answer."""

    ids: torch.Tensor
    options: Mapping[str, Any]


class Response(NamedTuple):
    """An answer, as text or without a processor as token ids ``[new]``, and the operation's report."""

    answer: str | torch.Tensor
    report: Report


def tail_prefill(plan: Plan) -> Prefill | None:
    """The first of the prefills at the tail of the window after which nothing runs; None without any.

    The question shares a forward with them: what comes after it is later work.
    """
    steps = [
        step
        for step in plan.steps
        if not (isinstance(step, Follow) or (isinstance(step, Archive | Harvest) and step.later))
    ]
    run = runs_of(steps)[-1] if steps else []
    first, prefills = run[0] if run else None, [step for step in run if isinstance(step, Prefill)]
    if not isinstance(first, Prefill) or len(prefills) < len(run):
        return None
    numbers = [seat.number for seat in (*first.before.seats, *(step.seat for step in prefills))]
    at_the_tail = numbers == [seat.number for seat in plan.after.seats]
    return first if at_the_tail and first.before.frame == plan.after.frame else None


class TokenSequence(NamedTuple):
    """A window's whole sequence: token ids, int64 ``[tokens]``, and positions, int64 ``[axes, tokens]``."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor


def sequence_behind(
    stage: Stage,
    state: WindowState,
    text: torch.Tensor,
    facts: Sequence[Facts] = (),
    places: Sequence[torch.Tensor] = (),
) -> TokenSequence:
    """A window, chunks that come at ``places``, and a text behind them, where the live cache has them."""
    anchor, chunks = stage.former.anchor, [*state.facts, *facts]
    ids = [anchor.input_ids, *(f.encoded.input_ids for f in chunks), text]
    front = [shift(anchor.positions, state.seats.frame), *state.positions, *places]
    return TokenSequence(torch.cat(ids), torch.cat([*front, text_behind(stage, state, text, facts)], dim=1))


def text_behind(
    stage: Stage, state: WindowState, text: torch.Tensor, facts: Sequence[Facts] = ()
) -> torch.Tensor:
    """Positions in the live cache of the ids of a text behind a window and ``facts``, ``[axes, tokens]``."""
    former = stage.former
    places = text_positions(former.backbone, former.anchor.input_ids, [*state.facts, *facts], text)
    return shift(places, state.seats.frame)


def state_with_answer(
    stage: Stage, state: WindowState, question: torch.Tensor, answer: Continuation
) -> WindowState:
    """The window with a question and the first tokens of its answer behind its chunks."""
    if answer.tail is None:
        return state
    spoken = torch.cat([question, answer.tokens[0].to(question)])[: kv_tokens(answer.tail)]
    # places are remembered by id: one id for two lengths would give the second the first one's
    facts = Facts(f"said {len(spoken)}", Encoded(spoken, {}, {}), "")
    positions, worth = text_behind(stage, state, spoken), footing(state.seats)
    source = Source(
        stage.spots.spot(facts, positions),
        state.seats.lineage,
        prefilled_behind(worth),
        canonical=False,
        behind=state.seats.tokens,
    )
    seat = Seat(facts.chunk_id, facts.length, source.home, source, source.guarantee, worth)
    return state.with_said(seat, Resident(facts, Copy(answer.tail, positions)))


ANSWER = 256
"""Tokens that another engine's answer may have if ``max_new_tokens`` is not given."""

Question = Spoken
"""Text, chat messages, or token ids ``[tokens]`` used as given."""


class Asker:
    """Asks questions behind one state of a window; its additions to the live cache are discarded."""

    def __init__(self, stage: Stage, state: WindowState) -> None:
        self.state = state
        self._stage = stage
        self._backbone = stage.former.backbone
        self._anchor = stage.former.anchor

    def question_ids(self, question: Question) -> torch.Tensor:
        """Token ids of a question; text and messages get the chat template's closing."""
        ids = self._backbone.builder.question_ids(question, self._anchor.tail)
        if ids.shape[0] == 0:
            raise EmptyChunk(f"question {quote(question)} has no tokens: ask something")
        return ids

    def logits_of(self, questions: Sequence[Question]) -> torch.Tensor:
        """Logits ``[questions, vocabulary]`` of the first token of each answer; they share forwards."""
        ids = [self.question_ids(question) for question in questions]
        longest = max(ids, key=len)
        positions = text_behind(self._stage, self.state, longest)
        self._stage.show(self.state, Tally())
        return torch.cat(self._backbone.ask(ids, positions, self._stage.live))

    def logits_of_answers(self, asked: Sequence[tuple[Question, torch.Tensor]]) -> list[torch.Tensor]:
        """Logits ``[tokens, vocabulary]`` from which each answer's tokens were, or would be, drawn."""
        pairs = [(self.question_ids(question), answer) for question, answer in asked]
        texts = [torch.cat([ids, answer.to(ids)])[:-1] for ids, answer in pairs]
        positions = text_behind(self._stage, self.state, max(texts, key=len))
        self._stage.show(self.state, Tally())
        every = self._backbone.ask(texts, positions, self._stage.live, every=True)
        return [rows[-len(answer) :] for rows, (_, answer) in zip(every, pairs, strict=True)]

    def answer_ids(self, question: Question, **options: Any) -> torch.Tensor:
        """New token ids, ``[sequences, new]``, as returned by the model's own ``generate``."""
        sequence = sequence_behind(self._stage, self.state, self.question_ids(question))
        self._stage.show(self.state, Tally())
        return self._backbone.decode(*sequence, self._stage.live, **options).tokens

    def exchange_chunk(self, question: Question, answer: torch.Tensor) -> Chunk:
        """Question and answer as one text chunk that leaves the user's turn open again."""
        backbone = self._backbone
        parts = [self.question_ids(question), answer]
        reopen = self._anchor.reopen
        is_spoken = isinstance(question, str) or as_messages(question) is not None
        if is_spoken and reopen:
            closing = backbone.builder.tokenize(reopen)
            # generate stops at the token that closes a turn, with which reopening begins
            if answer.shape[0] and int(answer[-1]) == int(closing[0]):
                closing = closing[1:]
            parts.append(closing)
        label = question if isinstance(question, str) else f"{len(parts[0])} question tokens"
        return backbone.chunk_from_tensors(torch.cat(parts), label=label[:80])
