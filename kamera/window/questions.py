"""Questions behind a window, which leave the window as it was."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch

from kamera.content import Chunk, Content, Encoded
from kamera.ops import kv_copy
from kamera.patches import Worth, later_of, prove_again
from kamera.store import Hit
from kamera.trust import ReusePolicy
from kamera.window.asking import ANSWER, Asker, Inquiry, Question, Response
from kamera.window.audit import hand_over
from kamera.window.contents import Contents, serial
from kamera.window.lookalikes import candidates
from kamera.window.naming import NamedRequest
from kamera.window.report import Report, SlotReport, Tally
from kamera.window.requests import Request, Without
from kamera.window.run import carry_out
from kamera.window.state import ShownSpan, Slot, moved
from kamera.window.steps import Plan

Ids = torch.Tensor | Sequence[int]
"""Token ids ``[tokens]``."""

Words = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Text, or chat messages."""

One = Literal[1]


class Questions(Contents):
    """The questions of a window."""

    _turn: int = 0  # questions so far

    @property
    def input_ids(self) -> torch.Tensor:
        """The whole token sequence, int64 ``[tokens]``."""
        return self._asker().window_ids()

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of that sequence, int64 ``[axes, tokens]``."""
        return self._asker().window_positions()

    @overload
    def generate(
        self, question: Words, *, keep: bool = ..., num_return_sequences: One = ..., **options: Any
    ) -> str: ...
    @overload
    def generate(
        self, question: Words, *, keep: bool = ..., num_return_sequences: int, **options: Any
    ) -> str | list[str]: ...
    @overload
    def generate(
        self, question: Ids, *, keep: bool = ..., num_return_sequences: One = ..., **options: Any
    ) -> str | torch.Tensor: ...
    @overload
    def generate(
        self, question: Ids, *, keep: bool = ..., num_return_sequences: int, **options: Any
    ) -> str | torch.Tensor | list[str] | list[torch.Tensor]: ...
    def generate(
        self, question: Question, *, keep: bool = False, **options: Any
    ) -> str | torch.Tensor | list[str] | list[torch.Tensor]:
        """Answer a question; without ``keep`` the window does not change.

        ``question`` is text, chat messages, or token ids ``[tokens]`` used as given. ``options``
        (max_new_tokens, do_sample, num_beams, streamer, …) go to ``generate`` of transformers; ValueError for
        others, before anything runs.
        Returns the answer's text, or token ids ``[new]`` without a processor; a list when several
        sequences are asked for. ``keep=True`` leaves question and answer in the window as a text
        chunk; an exchange larger than the window raises WindowFull, and its answer is lost.
        """
        with self._lock, self._account.now(self.backbone):
            self._check_backbone()
            self.backbone.check_sampling(options)
            asker = self._asker()
            self._heard(asker.question_ids(question))
            rows = asker.answer_ids(question, **options)
            self._audit_one()
            if keep:
                self.append(asker.exchange(question, rows[0]))
            texts = [text for row in rows if (text := self.backbone.detokenize(row)) is not None]
            if texts:
                return texts[0] if len(texts) == 1 else texts
            return rows[0] if len(rows) == 1 else list(rows)

    def respond(
        self,
        question: Question,
        request: Request | Plan,
        **options: Any,
    ) -> Response:
        """`KameraWindow.run`, and the answer to a question behind it: new chunks share its forward.

        The next text at the tail that begins with question and answer takes over their KV. ``options`` as for
        `generate`, of one sequence. An error leaves the window as it was. Raises the errors of `run` and
        `generate`.
        """
        with self._lock, self._account.now(self.backbone):
            self.backbone.check_sampling(options)
            several = options.get("num_return_sequences")
            if several not in (None, 1):
                raise ValueError(f"num_return_sequences={several}: a response is one answer")
            ids = self._asker().question_ids(question)
            inquiry = Inquiry(ids, options, len(ids) + int(options.get("max_new_tokens") or ANSWER))
            report, rows = self._answered(request, inquiry)
            assert rows is not None, "an inquiry is answered"
            self._heard(ids)
            self._audit_one()
            text = self.backbone.detokenize(rows[0])
            return Response(rows[0] if text is None else text, report)

    @serial
    def next_token_logits(self, question: Question) -> torch.Tensor:
        """Logits ``[vocabulary]`` of the first token of an answer; the window does not change."""
        self._check_backbone()
        asker = self._asker()
        self._heard(asker.question_ids(question))
        logits = asker.next_token_logits(question)
        self._audit_one()
        return logits

    @serial
    def next_token_logits_of(self, questions: Sequence[Question]) -> torch.Tensor:
        """`next_token_logits` of each, ``[questions, vocabulary]``; they share forwards."""
        self._check_backbone()
        return self._asker().logits_of(questions)

    @serial
    def expect(self, question: Question) -> None:
        """Announce a question before it is asked: patches formed from now on have to prove themselves on it.

        The last four that were announced or asked count (docs/proofs.md); no forward runs here.
        """
        self._check_backbone()
        self._heard(self._asker().question_ids(question))

    @serial
    def search(self, like: Content | Chunk, k: int = 5) -> list[Hit]:
        """The ``k`` archived chunks that look most like a picture: one vision encode, no forward."""
        self._check_backbone()
        return candidates(self._stage.former, like, k)

    @serial
    def shown(self) -> tuple[ShownSpan, ...]:
        """The anchor and each slot as the live cache shows them, in order."""
        self._check_backbone()
        self._stage.show(self._state, Tally())
        anchor, live = self.anchor, self._stage.live
        parts = [(Encoded(anchor.input_ids, {}, {}), moved(anchor.positions, self._state.seats.frame))]
        encoded = [facts.encoded for facts in self._state.facts]
        parts += zip(encoded, self._state.positions, strict=True)
        return tuple(
            ShownSpan(encoded, positions, kv_copy(live.read(i)))
            for i, (encoded, positions) in enumerate(parts)
        )

    @serial
    def is_load_bearing(self, slot: Slot | int, question: Question, *, max_new_tokens: int = 16) -> bool:
        """True if the answer changes without this chunk and the conditioning of others on it.

        First the cheap test (paper, appendix E): without the chunk, with later chunks on the best stored view
        that does not contain it, down to their canonicals. An unchanged answer decides for the price of a
        decode. A changed one decides only if no canonical was served blind; otherwise later chunks are
        prefilled without it, outside the window, and the answers compared. A window that lacks the
        certificate it needs skips the cheap test.
        """
        index = self._state.index(slot)
        self._check_backbone()
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        answer = self._asker().answer_ids(question, **options)
        if "patched" not in self._terms.reasons:
            cheap = self._without(index, self.policy.as_cheap())
            if torch.equal(cheap.answer_ids(question, **options), answer):
                return False
            if "blind" not in cheap.state.seats.worths[index:]:
                return True
        sure = self._without(index, self.policy.as_forming())
        return not torch.equal(sure.answer_ids(question, **options), answer)

    @abstractmethod
    def append(self, content: Chunk) -> SlotReport:
        """Put a chunk at the tail."""

    # -- inside --------------------------------------------------------------------------------

    @abstractmethod
    def _answered(
        self, request: Request | Plan, inquiry: Inquiry | None = None
    ) -> tuple[Report, torch.Tensor | None]:
        """One operation, and the answer's tokens ``[sequences, new]`` behind it, of an ``inquiry``."""

    def _heard(self, ids: torch.Tensor) -> None:
        """Patches formed from now on have to answer this question too; those it is unlike are proved again.

        No question waits for that, and a question that comes while it runs begins no other.
        """
        former, seats = self._stage.former, self._state.seats
        prover = former.prover
        if prover is None:
            return
        prover.heard(ids)
        doubted = []
        for i, seat in enumerate(seats.seats):
            proof, behind = seat.source.proof, seat.source.antecedents
            if proof is None or behind != seats.chunk_ids[:i]:
                continue
            if prover.doubts(ids, seat.chunk_id, behind, proof):
                doubted.append(i)
        queue, name = later_of(self.backbone), ("proved again", former.context)
        if doubted and not queue.busy(name):
            again = partial(prove_again, former, self._state.facts, doubted)
            queue.add(again, Worth.AUDIT, name=name)

    def _asker(self) -> Asker:
        return Asker(self._stage, self._state)

    def _without(self, index: int, policy: ReusePolicy) -> Asker:
        stage = replace(self._stage, live=self.backbone.live(), max_tokens=None)
        with stage.former.operation():
            named = NamedRequest(Without(index))
            return Asker(stage, carry_out(named, self._state, stage, policy, Tally()).state)

    def _audit_one(self) -> None:
        """Each question serves the whole window; one of its slots may be audited for it."""
        count = len(self._state.facts)
        if count:
            self._turn += 1
            hand_over(self._stage, self._state, [self._turn % count], self.policy.audit)
