"""A patch proves itself: probe questions are answered behind the true KV and behind the patched KV.

When a patch is formed the true KV is at hand, so what the patch loses can be measured there and then, on this
model, for this chunk and these antecedents: no certificate has to foretell it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass

import torch

from kamera import forks
from kamera.engines import Engine, Span
from kamera.errors import KameraError
from kamera.ops import KV, Deltas, PatchBudget, Proof, Sized, compared
from kamera.patches.anchor import Anchor
from kamera.patches.chunks import Facts
from kamera.patches.standing import text_positions

QUESTIONS = (
    "",
    "Describe what you see.",
    "What has changed since the beginning?",
    "What is in the last image, and where?",
    "Repeat what was said before.",
    "Is anything here named elsewhere? List it.",
)
"""Questions for any model. The answer to each is compared at every token of the question and its closing."""

ECHO = 16
"""Tokens of a text that a model without a tokenizer is asked to follow once more."""

ASKED = 4
"""Number of questions remembered of those that were asked of a window."""

DOUBLINGS = 3
"""How often rank and bytes of a patch may double until it proves itself: up to eight times the budget."""


NOTHING_ASKED = Proof(0.0, 0, 0, 0)
"""Of a patch that was asked nothing: it proves nothing."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Before:
    """What stands before a chunk where its patch is proved.

    ``spans`` are those of the anchor and of ``chunks``, which are in front of it. ``offset`` (per axis) takes
    the chunk's KV from where it was computed to its place among them, ``shift`` the positions of a question
    from those behind a window without gaps, from position 0 on.
    """

    spans: tuple[Span, ...]
    chunks: tuple[Facts, ...]
    offset: tuple[int, ...]
    shift: tuple[int, ...]


class Prover:
    """Forms patches that answer as the true KV does, within ``tolerance`` nats (`Proof.within`).

    Asks `QUESTIONS`, and the last questions that `heard` was told of. Without a tokenizer a chunk of text is
    asked for its own first tokens and those of the texts before it, as if they were quoted; a picture's patch
    has only the questions heard. Safe to use from several threads.
    """

    def __init__(self, backbone: Engine, anchor: Anchor, tolerance: float) -> None:
        self.tolerance = tolerance
        self._backbone = backbone
        self._anchor = anchor
        self._lock = forks.Lock()
        self._asked: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def heard(self, ids: torch.Tensor) -> None:
        """Remember a question's token ids ``[tokens]``: patches formed from now on answer it too."""
        key = tuple(ids.tolist())
        with self._lock:
            self._asked[key] = ids
            self._asked.move_to_end(key)
            while len(self._asked) > ASKED:
                self._asked.popitem(last=False)

    @property
    def asked(self) -> tuple[torch.Tensor, ...]:
        """The questions remembered, the last one at the end; token ids ``[tokens]`` each."""
        with self._lock:
            return tuple(self._asked.values())

    def form(
        self,
        budget: PatchBudget,
        deltas: Deltas,
        canonical: Span,
        true: KV,
        facts: Facts,
        before: Before,
    ) -> tuple[Sized, Proof]:
        """The smallest patch that proves itself, from ``budget`` up; the one of ``budget`` if none does, and
        one that was asked nothing if the questions could not be asked.

        ``canonical`` is the span that a patch is added to, at the chunk's place; ``true`` the KV prefilled
        there.
        """
        smallest = budget.form(deltas, self._backbone.layout, canonical.kv)
        try:
            questions = self._questions(facts, before)
            want = self._answers(Span(true, None, before.offset), facts, before, questions)
            first, sized = None, smallest
            for doubling in range(DOUBLINGS + 1):
                if doubling:
                    budget = budget.doubled(canonical.kv)
                    sized = budget.form(deltas, self._backbone.layout, canonical.kv)
                span = Span(canonical.kv, sized.formed.patch, canonical.offset)
                proof = compared(want, self._answers(span, facts, before, questions))
                if proof.within(self.tolerance):
                    return sized, proof
                first = first or proof
                if not questions:
                    break
        except (KameraError, torch.OutOfMemoryError) as error:
            # past the last position, or no room for a second cache: the operation itself has succeeded
            logger.warning("a patch of chunk %s was not proved: %s", facts.chunk_id[:12], error)
            return smallest, NOTHING_ASKED
        return smallest, first or NOTHING_ASKED

    def proof(self, true: KV, served: Span, facts: Facts, before: Before) -> Proof:
        """The proof of any KV that is served at a chunk's place for ``true``, which was prefilled there."""
        questions = self._questions(facts, before)
        want = self._answers(Span(true, None, before.offset), facts, before, questions)
        return compared(want, self._answers(served, facts, before, questions))

    def _questions(self, facts: Facts, before: Before) -> list[torch.Tensor]:
        tail = self._anchor.tail
        if self._backbone.vocabulary:
            generic = [self._backbone.question_ids(text, tail) for text in QUESTIONS]
        elif facts.encoded.tensors:
            generic = []  # what a picture shows cannot be asked in tokens that are not known
        else:
            texts = [f.encoded.input_ids for f in (facts, *before.chunks[::-1]) if not f.encoded.tensors]
            generic = [ids[:ECHO] for ids in texts[: len(QUESTIONS)]]
        return [ids for ids in (*generic, *self.asked) if ids.shape[0]]

    def _answers(
        self, span: Span, facts: Facts, before: Before, questions: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Logits ``[tokens, vocabulary]`` of each question behind ``span`` in its place."""
        live = self._backbone.live()
        longest = max((ids.shape[0] for ids in questions), default=0)
        shift = torch.tensor(before.shift)[:, None]

        def ask() -> list[torch.Tensor]:
            live.show([*before.spans, span], room=longest)
            found = []
            for ids in questions:
                places = text_positions(self._backbone, self._anchor.input_ids, [*before.chunks, facts], ids)
                found.append(self._backbone.follow(ids, places + shift, live))
            return found

        # in an empty context: what a proof asks is no work of the operation that formed the patch
        return Context().run(ask)
