"""Composed patches: from singles and ordered pairs to what a chunk absorbs from any order."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.ops import LowRank, Patch
from lab.composed import dense
from lab.composed.compose import compose, terms_of, through, triples_of

TOKENS, FEATURES, NAMES = 12, 16, 6


class Said:
    """A world in which the last antecedent that speaks of a token has the last word.

    Some speak through another: what they say is then what the latest one before them that they can be read
    through makes of it.
    """

    def __init__(self, seed: int, through: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.speaks = torch.rand(NAMES, TOKENS, generator=generator) < 0.5
        self.through = torch.rand(NAMES, NAMES, TOKENS, generator=generator) < through
        self.word = torch.randn(NAMES, TOKENS, FEATURES, generator=generator)
        changes = torch.randn(NAMES, NAMES, TOKENS, FEATURES, generator=generator)
        self.made = self.word + 0.8 * changes

    def behind(self, order: tuple[int, ...]) -> torch.Tensor:
        out = torch.zeros(TOKENS, FEATURES)
        for token in range(TOKENS):
            for place in reversed(range(len(order))):
                name = order[place]
                if self.speaks[name, token]:
                    before = [p for p in order[:place] if self.through[p, name, token]]
                    out[token] = self.made[before[-1], name, token] if before else self.word[name, token]
                    break
        return out

    def terms(self, order: tuple[int, ...]) -> dict[tuple[int, ...], torch.Tensor]:
        wanted = [*terms_of(order), *((i,) for i in order)]
        return {term: self.behind(term) for term in wanted}


def patch(*layers: torch.Tensor | None) -> Patch:
    """Each layer's deficit in one channel, whole; None corrects nothing."""
    factors = (None if x is None else LowRank(x, torch.eye(x.shape[1])) for x in layers)
    return Patch.of(tuple({} if f is None else {"v": f} for f in factors))


def composed(said: Said, order: tuple[int, ...]) -> torch.Tensor:
    """What composition makes of an order, of one layer and channel."""
    return compose({term: patch(x) for term, x in said.terms(order).items()}, order).deltas[0]["v"]


def drawn(seed: int, names: int, triples: bool = False) -> dict[tuple[int, ...], Patch]:
    """Noise in two layers of two channels, of all terms; one of them corrects one channel less."""
    generator = torch.Generator().manual_seed(seed)

    def factors(width: int) -> LowRank:
        return LowRank(*(torch.randn(n, 3, generator=generator) for n in (TOKENS, width)))

    singles: list[tuple[int, ...]] = [(i,) for i in range(names)]
    terms = [*singles, *itertools.permutations(range(names), 2), tuple(range(names))]
    terms += itertools.permutations(range(names), 3) if triples else ()
    out = {term: Patch.of(tuple({"k": factors(5), "v": factors(9)} for _ in range(2))) for term in terms}
    out[0, 1] = Patch.of(({"v": factors(9)}, out[0, 1].layers[1]))
    return out


def apart(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


# -- what it recovers ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**31 - 1), st.permutations(range(NAMES)), st.integers(3, NAMES))
def test_who_spoke_last_is_recovered(seed, names, count):
    said, order = Said(seed), tuple(names[:count])
    assert apart(composed(said, order), said.behind(order)) < 0.05


def test_the_latest_that_bears_on_the_last_word_is_read():
    """Only the third speaks; the first two change what it says, and the second is nearer to it."""
    said, order = Said(8), (0, 1, 2)
    said.speaks[:2], said.speaks[2] = False, True
    said.through[:2, 2] = True
    made = composed(said, order)
    others = [said.made[0, 2], said.word[2], torch.zeros(TOKENS, FEATURES)]
    assert apart(made, said.made[1, 2]) < 0.4 < min(apart(made, other) for other in others)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31 - 1), st.integers(3, NAMES))
def test_every_token_is_read_once_whatever_the_terms(seed, count):
    generator = torch.Generator().manual_seed(seed)
    order = tuple(range(count))
    wanted = [*((i,) for i in order), *itertools.combinations(order, 2)]
    terms = {term: torch.randn(TOKENS, FEATURES, generator=generator) for term in wanted}
    weights = torch.stack(list(dense.weights_of(terms, order).values()))
    assert torch.allclose(weights.sum(0), torch.ones(TOKENS), atol=1e-5)
    assert float(weights.min()) >= 0.0


def test_a_word_that_is_read_through_two_needs_its_triple():
    """What the last says is changed by the second, and that change by the first: no pair shows it."""
    generator = torch.Generator().manual_seed(4)
    word, changed, deeper = (torch.randn(TOKENS, FEATURES, generator=generator) for _ in range(3))

    def behind(order: tuple[int, ...]) -> torch.Tensor:
        if 3 not in order:
            return torch.zeros(TOKENS, FEATURES)
        if 1 not in order:
            return word
        return deeper if 0 in order else changed

    order = (0, 1, 2, 3)
    pairs = {term: patch(behind(term)) for term in terms_of(order)}
    triples = {term: patch(behind(term)) for term in triples_of(order)}
    assert apart(compose(pairs, order).deltas[0]["v"], changed) < 0.2
    assert apart(compose(pairs | triples, order).deltas[0]["v"], deeper) < 0.2


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31 - 1), st.integers(4, NAMES))
def test_triples_take_no_more_than_a_pair_had(seed, count):
    generator = torch.Generator().manual_seed(seed)
    pairs = {p: torch.rand(TOKENS, generator=generator) for p in itertools.combinations(range(count), 2)}
    made = through(pairs, triples_of(range(count)), lambda *_: torch.rand(TOKENS, generator=generator))
    whole, left = torch.stack(list(pairs.values())).sum(0), torch.stack(list(made.values()))
    assert torch.allclose(left.sum(0), whole, atol=1e-5) and float(left.min()) > -1e-6
    assert all(bool((made[pair] <= weight + 1e-6).all()) for pair, weight in pairs.items())


def test_a_pair_keeps_what_no_triple_takes():
    made = through({(0, 1): torch.ones(2)}, [(0, 1, 2), (0, 2, 3)], lambda *_: torch.tensor([0.1, 1.0]))
    assert torch.allclose(made[0, 1], torch.tensor([0.9, 0.0])) and set(made) == {(0, 1), (0, 1, 2)}


def test_fewer_than_four_have_no_triples():
    assert triples_of((2, 0, 1)) == [] and len(triples_of((3, 2, 0, 1))) == 4


def test_terms_that_agree_are_composed_to_what_they_agree_on():
    word = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(3))
    order = (0, 1, 2, 3)
    made = compose({term: patch(word) for term in terms_of(order)}, order)
    assert apart(made.deltas[0]["v"], word) < 1e-5
    assert made.doubt < 1e-5


def test_silent_antecedents_compose_to_nothing():
    order = (0, 1, 2)
    made = compose({term: patch(torch.zeros(TOKENS, FEATURES)) for term in terms_of(order)}, order)
    assert not made.deltas[0]["v"].any() and made.doubt == 0.0


@pytest.mark.parametrize("order", [(4,), (2, 5), (5, 2)])
def test_one_or_two_antecedents_are_their_own_patch(order):
    said = Said(1)
    assert terms_of(order) == [order]
    made = compose({order: patch(said.behind(order))}, order)
    assert torch.equal(made.deltas[0]["v"], said.behind(order)) and made.doubt < 1e-6


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**31 - 1), st.permutations(range(5)), st.integers(3, 5), st.booleans())
def test_factors_compose_as_matrices_do(seed, names, count, triples):
    terms, order, old = drawn(seed, 5, triples), tuple(names[:count]), tuple(range(5))
    for known in (None, (old, terms[old])):
        ours, plain = compose(terms, order, known), dense.composed(terms, order, known)
        assert ours.doubt == pytest.approx(plain.doubt, abs=1e-5)
        assert ours.missed == pytest.approx(plain.missed, abs=1e-5)
        for mine, reference in zip(ours.deltas, plain.deltas, strict=True):
            assert all(apart(mine[name], reference[name]) < 1e-4 for name in ("k", "v"))


# -- what is known of another order ----------------------------------------------------------------


def test_an_order_that_is_known_composes_to_what_is_known():
    said, order = Said(2), (3, 0, 1, 4)
    truth = said.behind(order) + 0.3
    terms = {term: patch(x) for term, x in said.terms(order).items()}
    made = compose(terms, order, (order, patch(truth)))
    assert apart(made.deltas[0]["v"], truth) < 1e-5
    assert made.missed is not None and 0.0 < made.missed < 1.0
    assert compose(terms, order).missed is None


def test_what_is_known_says_nothing_where_the_composition_changes():
    here, there = torch.ones(2, 3), torch.ones(2, 3)
    there[1] = -100.0
    made = dense.make_up(here, there, there + 5.0)
    assert torch.allclose(made[0], torch.tensor(6.0)) and float((made[1] - 1.0).abs().max()) < 1.0


# -- doubt -----------------------------------------------------------------------------------------


def test_doubt_is_small_where_pairs_agree_and_large_for_noise():
    order = (0, 1, 2, 3, 4)
    plain = compose({t: patch(x) for t, x in Said(5).terms(order).items()}, order)
    generator = torch.Generator().manual_seed(0)
    noise = {t: patch(torch.randn(TOKENS, FEATURES, generator=generator)) for t in Said(5).terms(order)}
    assert plain.doubt < 0.05 < 0.3 < compose(noise, order).doubt


# -- form ------------------------------------------------------------------------------------------


def test_layers_and_channels_nobody_corrects_stay_uncorrected():
    said, order = Said(6), (0, 1, 2)
    terms = {term: patch(None, said.behind(term)) for term in terms_of(order)}
    terms[0, 1] = patch(None, None)  # a patch that says nothing is a deficit of zero
    made = compose(terms, order)
    assert made.deltas[0] == {} and made.deltas[1]["v"].shape == (TOKENS, FEATURES)


def test_no_antecedents_twins_and_missing_terms_are_refused():
    terms = {term: patch(Said(7).behind(term)) for term in terms_of((0, 1, 2))}
    with pytest.raises(ValueError, match="at least one antecedent"):
        compose(terms, ())
    with pytest.raises(ValueError, match="twice"):
        compose(terms, (0, 1, 0))
    with pytest.raises(ValueError, match=r"no patch behind \(2,\): 3 of 6 terms"):
        compose({t: p for t, p in terms.items() if 2 not in t}, (0, 1, 2))
