"""What came before is cut out of a prompt as it was, and served as far as the policy admits it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from kamera.patches import background_of
from kamera.reuse import RULES, Prompt
from kamera.window import sequence_of
from tests.reuse.rig import HEAD, error, family, plain, reuser, words
from tests.sessions.rig import plain_logits, speaking
from tests.window.rig import borne, watching

NAME = "llama_mqa"
RULE = RULES["high"]
"""A rule without resets: nothing tells where passages begin."""

PASSAGES = [words(100 + seed, 40 + 17 * seed) for seed in range(5)]
QUESTION = words(99, 40)


def shuffled(order) -> Prompt:
    """Passages in this order behind the sink, without an anchor."""
    return Prompt.of(torch.cat([HEAD, *(PASSAGES[i] for i in order), QUESTION]).numpy())


def spans(done) -> list[tuple[int, ...]]:
    """The tokens of a window's chunks."""
    ids = sequence_of(done.window).input_ids
    return [tuple(ids[s.start : s.start + s.length].tolist()) for s in done.window.slots]


orders = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=2, max_size=5)


@settings(max_examples=12, deadline=None)
@given(orders)
def test_shuffled_passages_answer_as_without_reuse(drawn):
    backbone = family(NAME)
    one = reuser(backbone, policy=ReusePolicy.exact(), rule=RULE)
    for order in drawn:
        asked = shuffled(order)
        plan = one.prepare(asked)
        done = plan.run()
        pieces = [*spans(done), tuple(done.question.tolist())]
        assert [*HEAD.tolist(), *itertools.chain(*pieces)] == asked.ids.tolist()
        assert [a.tokens for a in plan.admissions] == [len(piece) for piece in pieces[:-1]]
        assert (done.report.forwards, done.report.tokens_recomputed) == (plan.cost.forwards, plan.cost.tokens)
        assert {a.guarantee for a in done.admissions} <= {"exact"}
        assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4


ORDERS = ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1], [2, 1, 0])


def test_a_conversation_finds_what_moved_inside_its_messages():
    backbone = speaking("headers")
    one = reuser(backbone, policy=ReusePolicy.exact())
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=120)) for _ in range(3)]
    known: set[tuple[int, ...]] = set()
    for order in ORDERS:
        messages = [{"role": "user", "content": " ".join(texts[i] for i in order)}]
        done = one.prepare(messages).run()
        assert error(done.window.next_token_logits(done.question), plain_logits(backbone, messages)) < 1e-4
        again = sum(len(piece) for piece in spans(done) if piece in known)
        known |= {*spans(done)}
    assert again > 0.9 * sum(map(len, spans(done)))


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1), (0, 2, 1, 0)])
def test_pictures_and_texts_that_moved_together_answer_as_without_reuse(order):
    backbone = HfEngine(*testbed.load())
    frames = [frame.image for frame in testbed.World(seed=3).episode(0, legends=4).frames]
    text = "What is the value of tag 3? And of all the others that you see here, in order?"

    def asked(order) -> list[dict]:
        shown = ({"type": "image", "image": frames[i]} for i in order)
        content = [item for one in shown for item in (one, {"type": "text", "text": text})]
        return [{"role": "user", "content": content}]

    one = reuser(backbone, policy=ReusePolicy.exact())
    known = {*spans(one.prepare(asked((0, 1, 2))).run())}
    done = one.prepare(asked(order)).run()
    assert error(done.window.next_token_logits(done.question), plain_logits(backbone, asked(order))) < 1e-4
    assert sum(len(piece) for piece in spans(done) if piece in known) > 0.7 * sum(map(len, spans(done)))


LONG = [[2, 3, 4], [4, 2, 3], [3, 4, 2], [2, 4, 3], [4, 3, 2], [3, 2, 4]]
"""Orders of passages that are no glue."""


def served(one, orders) -> tuple[float, int]:
    """The share of the last prompt's tokens that is not prefilled, and the tokens of all background work."""
    later = 0
    for order in orders:
        plan = one.prepare(shuffled(order))
        done = plan.run()
        background_of(one.backbone).flush()
        later += plan.later.tokens
    taken = sum(a.tokens for a in done.admissions if a.tier != "none")
    return taken / sum(a.tokens for a in done.admissions), later


@pytest.mark.few(1)
@pytest.mark.parametrize("forms", ["returning", "always"])
@pytest.mark.parametrize("minimum", ["exact", "patched", "blind"])
def test_plans_and_account_tell_all_forwards(minimum, forms):
    """What plans said of now and of later, and the account, equal hooks on the model once all is done."""
    backbone = family(NAME)
    policy = ReusePolicy(minimum, forms=forms, audit=0.0)
    with watching(backbone, later=True) as seen:
        one = reuser(backbone, policy=policy, rule=RULE)
        one.prepare(shuffled(LONG[0]))  # the anchor
        background_of(backbone).flush()
        before = one.usage()
        said = [0, 0]
        for order in (*LONG, LONG[0], LONG[1]):
            plan = one.prepare(shuffled(order))
            plan.run()
            background_of(backbone).flush()
            for cost in (plan.cost, plan.later):
                said = [said[0] + cost.forwards, said[1] + cost.tokens]
    after = one.usage()
    assert borne(seen, after)
    ran = [
        sum(getattr(spent, name) - getattr(old, name) for spent, old in zip(after, before, strict=True))
        for name in ("forwards", "tokens")
    ]
    assert ran == said
    assert said[0] > 3
