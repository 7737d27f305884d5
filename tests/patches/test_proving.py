"""A patch is asked before it is served: by which questions, and how large it may become."""

from __future__ import annotations

from dataclasses import replace

import torch

from kamera.engines import Span
from kamera.errors import NotRelocatable
from kamera.ops import PatchBudget, deficit
from kamera.patches import Prover
from kamera.patches.line import Line
from kamera.patches.proving import ASKED, NOTHING_ASKED, QUESTIONS
from kamera.store import ChunkStore
from tests.patches.engine import LAYOUT, SmallEngine, former_of, picture, text

A, T = text(1), text(2, tokens=9)


class Place:
    """The target behind A: its patch's deficits, and what a prover is told of it."""

    def __init__(self, engine: SmallEngine, target=T) -> None:
        with ChunkStore.open("memory://") as store:
            former = former_of(engine, store)
            self.anchor, self.line = former.anchor, Line(former)
            self.line.arrange([A])
            self.target = former.encodings.make(target) if hasattr(target, "inputs") else target
            self.true = self.line.prefill(self.target).kv
            canonical = former.canonical(self.target).kv
        self.deltas = deficit(self.true, canonical, LAYOUT, [A.length])
        self.span = Span(canonical, None, (A.length,))
        self.given = (self.deltas, self.span, self.true, self.target, self.line.before)


def test_the_last_questions_are_remembered_and_one_asked_again_is_the_latest(engine):
    prover = Prover(engine, Place(engine).anchor, 0.1)
    for first in (*range(5, 5 + ASKED + 1), 7):
        prover.remember(torch.tensor([first, 4]))
    assert [int(ids[0]) for ids in prover.remembered_questions] == [6, 8, 9, 7]


def test_a_whole_patch_proves_itself_and_a_cut_one_grows_until_it_does(engine):
    place = Place(engine)
    prover = Prover(engine, place.anchor, 1e-6)
    whole, proof = prover.form(PatchBudget(9), *place.given)
    assert proof.holds_at(1e-6) and whole.budget.rank == 9
    grown, proof = prover.form(PatchBudget(3), *place.given)
    assert proof.holds_at(1e-6) and grown.budget.rank > 3


def test_a_patch_that_never_proves_itself_is_that_of_the_budget_with_its_own_proof(engine):
    place = Place(engine)
    prover = Prover(engine, place.anchor, -1.0)  # nothing is as near as that
    sized, proof = prover.form(PatchBudget(1), *place.given)
    assert (sized.budget.rank, proof.holds_at(-1.0)) == (1, False)
    served = replace(place.span, patch=sized.formed.patch)
    assert proof == prover.proof(place.deltas, place.true, served, T, place.line.before)


def test_without_a_tokenizer_a_text_is_asked_for_itself_and_the_texts_before_it(engine):
    place = Place(engine)
    _, proof = Prover(engine, place.anchor, 0.1).form(PatchBudget(9), *place.given)
    assert proof.questions == 2 and proof.tokens == T.length + A.length
    prover = Prover(engine, place.anchor, 0.1)
    prover.remember(torch.tensor([5, 6, 7]))
    _, proof = prover.form(PatchBudget(9), *place.given)
    assert (proof.questions, proof.tokens) == (3, T.length + A.length + 3)


def test_without_a_tokenizer_a_picture_has_only_the_questions_heard(engine):
    place = Place(engine, picture(1))
    _, proof = Prover(engine, place.anchor, 0.1).form(PatchBudget(9), *place.given)
    assert (proof.questions, proof.holds_at(0.1)) == (0, False)
    prover = Prover(engine, place.anchor, 0.1)
    prover.remember(torch.tensor([5, 6, 7]))
    _, proof = prover.form(PatchBudget(9), *place.given)
    assert proof.questions == 1 and proof.holds_at(0.1)


def test_with_a_tokenizer_every_patch_is_asked_the_same_questions():
    engine = SmallEngine(words="v" * 64)
    for target in (T, picture(1)):
        place = Place(engine, target)
        _, proof = Prover(engine, place.anchor, 0.1).form(PatchBudget(9), *place.given)
        assert proof.questions == sum(bool(question) for question in QUESTIONS)


def test_a_question_that_cannot_be_asked_proves_nothing_and_fails_nothing(engine, monkeypatch, caplog):
    place = Place(engine)

    def past_the_end(texts, positions, behind, *, every):
        raise NotRelocatable("past the end")

    monkeypatch.setattr(engine, "ask", past_the_end)
    sized, proof = Prover(engine, place.anchor, 0.1).form(PatchBudget(2), *place.given)
    assert (sized.budget.rank, proof) == (2, NOTHING_ASKED)
    assert "was not proved: past the end" in caplog.text
