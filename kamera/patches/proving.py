"""A patch proves itself: probe questions are answered behind the true KV and behind the patched KV.

When a patch is formed the true KV is at hand, so what the patch loses can be measured there and then, on this
model, for this chunk and these antecedents: no certificate has to foretell it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kamera import forks
from kamera.engines import Engine, Span
from kamera.errors import KameraError
from kamera.ops import KV, Deltas, PatchBudget, Sized, kv_copy, kv_tensors
from kamera.patches.anchor import Anchor
from kamera.patches.chunks import Facts, text_positions
from kamera.trust import Guarantee, Proof, compare, kv_error, sketch

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


NOTHING_ASKED = Proof(0.0, 0, 0, 0.0, ())
"""Of a patch that was asked nothing: it proves nothing."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Before:
    """What a chunk was prefilled behind, and what stands before it where its patch is proved.

    ``names`` are its antecedents, as in `Seats.lineage`, ``formed`` the weakest guarantee among them.
    ``spans`` are those of the anchor and of ``chunks``, which are in front of it. ``offset`` (per axis) takes
    the chunk's KV from where it was computed to its place among them, ``shift`` the positions of a question
    from those behind a window that begins at position 0.
    """

    names: tuple[str, ...]
    formed: Guarantee
    spans: tuple[Span, ...]
    chunks: tuple[Facts, ...]
    offset: tuple[int, ...]
    shift: tuple[int, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of its KV."""
        return [tensor for span in self.spans for tensor in kv_tensors(span.kv)]


class _Seen(NamedTuple):
    """A chunk's KV as the serving kernels make it at its place, and the logits of each question behind it."""

    kv: KV
    answers: tuple[torch.Tensor, ...]


class Prover:
    """Forms patches whose KV is near the true KV and answers as it does, within ``tolerance`` nats
    (`Proof.holds_at`).

    Asks `QUESTIONS`, and the last questions of `remember`. Without a tokenizer a chunk of text is asked for
    its own first tokens and those of the texts before it, as if they were quoted; a picture's patch has only
    the questions remembered. Safe to use from several threads.

    ``again`` are the proofs of patches that were proved again since they were placed, by chunk and
    antecedents.
    """

    def __init__(self, backbone: Engine, anchor: Anchor, tolerance: float) -> None:
        self.tolerance = tolerance
        self._backbone = backbone
        self._anchor = anchor
        self._lock = forks.Lock()
        self._asked: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self.again: dict[tuple[str, tuple[str, ...]], Proof] = {}

    def remember(self, ids: torch.Tensor) -> None:
        """Remember a question's token ids ``[tokens]``: patches formed from now on answer it too."""
        key = tuple(ids.tolist())
        with self._lock:
            self._asked[key] = ids
            self._asked.move_to_end(key)
            while len(self._asked) > ASKED:
                self._asked.popitem(last=False)

    @property
    def remembered_questions(self) -> tuple[torch.Tensor, ...]:
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
            want = self._observe(Span(true, None, before.offset), facts, before, questions)
            first, sized = None, smallest
            for doubling in range(DOUBLINGS + 1):
                if doubling:
                    budget = budget.double(canonical.kv)
                    sized = budget.form(deltas, self._backbone.layout, canonical.kv)
                span = Span(canonical.kv, sized.formed.patch, canonical.offset)
                proof = self._proof(want, self._observe(span, facts, before, questions), deltas, questions)
                if proof.holds_at(self.tolerance):
                    return sized, proof
                first = first or proof
                if not questions:
                    break
        except (KameraError, torch.OutOfMemoryError) as error:
            # past the last position, or no room for a second cache: the operation itself has succeeded
            logger.warning("a patch of chunk %s was not proved: %s", facts.chunk_id[:12], error)
            return smallest, NOTHING_ASKED
        return smallest, first or NOTHING_ASKED

    def proof(self, deltas: Deltas, true: KV, served: Span, facts: Facts, before: Before) -> Proof:
        """The proof of any KV that is served at a chunk's place for ``true``, which was prefilled there.

        ``deltas`` are what it absorbed there, which its errors are measured by.
        """
        questions = self._questions(facts, before)
        want = self._observe(Span(true, None, before.offset), facts, before, questions)
        return self._proof(want, self._observe(served, facts, before, questions), deltas, questions)

    def doubts(self, ids: torch.Tensor, chunk_id: str, antecedents: tuple[str, ...], proof: Proof) -> bool:
        """True if the proof of a chunk's patch does not tell of a question of these ids ``[tokens]``."""
        return not self.again.get((chunk_id, antecedents), proof).covers(self._sketch(ids))

    # -- inside --------------------------------------------------------------------------------

    def _proof(self, want: _Seen, got: _Seen, deltas: Deltas, questions: Sequence[torch.Tensor]) -> Proof:
        asked = tuple(map(self._sketch, questions))
        return compare(want.answers, got.answers, asked, kv_error(want.kv, got.kv, deltas))

    def _sketch(self, ids: torch.Tensor) -> str:
        """The sketch of a question without the closing of the chat template, which all have."""
        tail = self._tail
        closed = 0 < len(tail) <= len(ids) and torch.equal(ids[-len(tail) :], tail)
        return sketch((ids[: -len(tail)] if closed else ids).tolist())

    @cached_property
    def _tail(self) -> torch.Tensor:
        """Token ids that close every question of text; none without a tokenizer."""
        if not self._backbone.identity.vocabulary():
            return torch.empty(0, dtype=torch.int64)
        return self._backbone.builder.question_ids("", self._anchor.tail)

    def _questions(self, facts: Facts, before: Before) -> list[torch.Tensor]:
        tail = self._anchor.tail
        if self._backbone.identity.vocabulary():
            generic = [self._backbone.builder.question_ids(text, tail) for text in QUESTIONS]
        elif facts.encoded.tensors:
            generic = []  # what a picture shows cannot be asked in tokens that are not known
        else:
            texts = [f.encoded.input_ids for f in (facts, *before.chunks[::-1]) if not f.encoded.tensors]
            generic = [ids[:ECHO] for ids in texts[: len(QUESTIONS)]]
        return [ids for ids in (*generic, *self.remembered_questions) if ids.shape[0]]

    def _observe(self, span: Span, facts: Facts, before: Before, questions: Sequence[torch.Tensor]) -> _Seen:
        """What is served of ``span`` in its place, and the answers behind it."""
        live = self._backbone.live()
        longest = max((ids.shape[0] for ids in questions), default=0)
        shift = torch.tensor(before.shift)[:, None]

        live.show([*before.spans, span], room=longest)
        kv = kv_copy(live.read(len(before.spans)))
        if not questions:
            return _Seen(kv, ())
        question = max(questions, key=len)  # all begin at the same place
        places = text_positions(self._backbone, self._anchor.input_ids, [*before.chunks, facts], question)
        return _Seen(kv, self._backbone.ask(questions, places + shift, live, every=True))
