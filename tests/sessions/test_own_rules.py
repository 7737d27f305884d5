"""Clients with rules of their own: after the first edit a turn runs its new tokens, exact.

Text alone, on a tiny model: what is counted by hooks is held against a prefix cache that has the prompt
before and its answer, and logits against the plain model's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool
from kamera.content import common_prefix
from kamera.edits import Client
from kamera.engines.hf import HfEngine
from tests.edits.test_clients import turns
from tests.edits.test_examples import CLIENTS, calls, chat, exchanges
from tests.engines.compare import relative
from tests.models.hooks import hooked
from tests.sessions.rig import plain_logits, speaking

Messages = list[dict[str, Any]]
OPTIONS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
ANSWER = 2  # forwards of an answer of three tokens behind its prompt
TEXTS = [name for name in CLIENTS if name != "picture replaced"]
FORGETS = 2  # departures that two rules explain
PLAIN = replace(ReusePolicy.exact(), audit=0.0)


def backbone_of(name: str) -> HfEngine:
    """A tiny model whose template shows what the client sends."""
    return speaking("thinking" if name.startswith("tool") else "headers")


class Counter:
    """Tokens of each forward, as a hook on the first layer sees them, and the threads that ran them."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.spans.append((threading.get_ident(), int(hidden.shape[1])))

    def mine(self, start: int) -> list[int]:
        return [span for thread, span in self.spans[start:] if thread == threading.get_ident()]


@dataclass(frozen=True)
class Ran:
    """Tokens of one turn: before its answer, new ones, a prefix cache's, and all in the background."""

    now: int
    new: int
    prefix: int
    later: int
    edited: bool


def requests(name: str) -> list[Messages]:
    """What a client sends, turn by turn."""
    full, rule = CLIENTS[name]
    full = calls(8, plain=True) if name.startswith("tool") else full  # what the tiny model has positions for
    return [rule(full[:i]) for i in [*turns(full), len(full)]]


def tokens(backbone: HfEngine, messages: Messages, asks: bool = True) -> list[int]:
    template = backbone.processor.apply_chat_template
    return list(template(messages, tokenize=True, add_generation_prompt=asks, return_dict=True)["input_ids"])


def walk(owner: ChatSession | SessionPool, asked: Sequence[Messages], **options: Any) -> Iterator[Ran]:
    """The turns of a client whose answers are its own, whatever the model says."""
    backbone, counter = owner.backbone, Counter()
    held: list[int] = []
    before: Messages = []
    with hooked(backbone, (backbone.decoder.layers[0].register_forward_pre_hook, counter), with_kwargs=True):
        for messages in asked:
            at = len(counter.spans)
            turn = owner.send(messages, **options, **OPTIONS)
            spans = counter.mine(at)
            owner.flush()
            assert turn.report.guarantee == "exact"
            prompt = tokens(backbone, messages)
            same = common_prefix(prompt[:-1], held)
            answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            start = answers[-1] if before else 0
            new = len(prompt) - (len(tokens(backbone, messages[:start], asks=False)) if start else 0)
            edits = bool(before) and messages[:start] != before
            now, later = sum(spans[: len(spans) - ANSWER]), owner.usage().background.tokens
            yield Ran(now, new, len(prompt) - same, later, edits)
            held, before = [*prompt, *turn.token_ids[:-1]], messages
    usage = owner.usage()
    assert usage.now.tokens + usage.background.tokens == sum(span for _, span in counter.spans)
    assert usage.now.forwards + usage.background.forwards == len(counter.spans)


def opened(name: str = "", **options: Any) -> ChatSession:
    return ChatSession(backbone_of(name), ChunkStore.open("memory://"), policy=PLAIN, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TEXTS)
def test_from_the_second_edit_on_a_turn_runs_its_new_tokens(name):
    session, allowed, edits = opened(name), 0, list[bool]()
    for ran in walk(session, requests(name)):
        assert ran.now <= ran.prefix, "never dearer before the first token"
        allowed += ran.prefix
        assert ran.later <= allowed, "nor is all that was prepared"
        if ran.edited:
            edits.append(ran.now <= ran.new < ran.prefix)
    assert len(edits) >= 5 and not edits[0], "the first one is not known"
    assert edits[1:].count(False) < FORGETS
    assert all(edits[-4:])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["oldest exchange dropped", "messages counted", "thinking stripped"])
def test_what_is_served_is_what_the_plain_model_says(name):
    session = opened()
    for messages in requests(name):
        want = plain_logits(session.backbone, messages)
        branch = session.fork()
        turn = session.send(messages, **OPTIONS)
        assert relative(session.next_token_logits(messages), want) <= 1e-4
        assert turn.text == branch.send(messages, **OPTIONS).text
        session.anticipate()
        session.flush()


@pytest.mark.slow
def test_who_foretells_nothing_runs_what_a_prefix_cache_runs(monkeypatch):
    """The tests above can fail: this is what they see without the rule, and without the work."""
    name = "oldest exchange dropped"
    for options in ({"anticipates": False}, {}):
        session = opened(**options)
        ran = [*walk(session, requests(name))]
        found = [one.now > one.new for one in ran if one.edited]
        assert all(found) is bool(options)
    monkeypatch.setattr(Client, "next", lambda *_: None)
    session = opened()
    ran = [*walk(session, requests(name))]
    assert all(one.now > one.new for one in ran if one.edited)
    assert session.usage().background.tokens == 0


def drops(counts: Sequence[int]) -> list[Messages]:
    """What a client sends that drops so many of its oldest exchanges at each turn."""
    full, asked = chat(len(counts)), list[Messages]()
    history = full[:1]
    for i, count in enumerate(counts):
        history = [history[0], *history[1 + 2 * count :], full[2 * i + 1]]
        asked.append(history)
        history = [*history, full[2 * i + 2]]
    return asked


def test_a_rule_that_was_wrong_twice_is_doubted_until_it_is_seen_twice_again():
    """Where one exchange is thought to leave, first two do, then none; then one does at each turn."""
    counts = [0, 0, 0, 0, 1, 2, 1, 0, 1, 1, 1, 1]
    session = opened()
    ran = [*walk(session, drops(counts))]
    prepared = [bool(b.later - a.later) for a, b in zip([ran[0], *ran], ran, strict=False)]
    assert prepared[:8] == [False] * 4 + [True, False, True, False], "two guesses, both wrong"
    assert prepared[8:] == [False, True, True, True], "the first of its kind is not enough any more"
    assert [one.now <= one.new for one in ran[8:]] == [False, False, True, True]
    assert all(one.now <= one.prefix for one in ran)


def test_a_wrong_guess_serves_nothing():
    full, keeps = chat(10), exchanges(2)
    ends = [*turns(full)]
    asked = [keeps(full[:i]) for i in ends]
    guessing, plain = opened(), opened(anticipates=False)
    for messages in asked[:5]:
        for session in (guessing, plain):
            session.send(messages, **OPTIONS)
            session.flush()
    other = [
        asked[4][0],
        *asked[4][3:],
        *asked[5][-2:],
    ]  # half of the next, too
    other[1] = {"role": "user", "content": "Something else."}
    answers = [session.send(other, **OPTIONS) for session in (guessing, plain)]
    assert answers[0].report.anticipated == 0
    assert answers[0].report.prefilled == answers[1].report.prefilled
    assert answers[0].text == answers[1].text
    assert relative(guessing.next_token_logits(other), plain_logits(guessing.backbone, other)) <= 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["oldest exchange dropped", "messages counted", "thinking stripped"])
def test_a_pool_runs_little_more_than_the_new_tokens_from_the_fourth_turn_on(name):
    pool = SessionPool(backbone_of(name), ChunkStore.open("memory://"), policy=PLAIN)
    full, rule = CLIENTS[name]
    asked = [rule(full[:i]) for i in turns(full)]
    first = next(i for i, (a, b) in enumerate(pairwise(asked)) if b[: len(a)] != a)
    asked = asked[max(0, first - 2) :]  # the third turn edits
    ran = [*walk(pool, asked, session_id="agent")][3:]
    assert sum(one.now for one in ran) <= 1.6 * sum(one.new for one in ran)
    assert sum(one.now for one in ran) < 0.7 * sum(one.prefix for one in ran)
