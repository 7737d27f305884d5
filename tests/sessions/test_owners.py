"""Conversations without ids: each keeps its session, and none attends to what another dropped."""

from __future__ import annotations

import random

import pytest

from kamera import ChunkStore
from kamera.sessions import CallForm, SessionPool
from kamera.sessions.table import tails_of
from kamera.trust import at_least, weakest
from tests.content.templates import picture
from tests.sessions.rig import FULL, seeing, speaking

SYSTEM = {"role": "system", "content": "You use a computer."}
TASK = {"role": "user", "content": "Find the lamp."}


def shot(number: int) -> dict:
    return {
        "role": "user",
        "content": [{"type": "image", "image": picture(number)}, {"type": "text", "text": "?"}],
    }


def pool(backbone=None, **options) -> SessionPool:
    store = ChunkStore.open("memory://")
    return SessionPool(backbone or seeing(), store, policy=FULL, mode="amortize", **options)


class Walk:
    """A conversation whose client drops what it likes, and what it has ever sent."""

    def __init__(self, rng: random.Random, of: SessionPool, hint: str = "") -> None:
        self.rng, self.pool, self.hint = rng, of, hint
        self.history: list[dict] = [SYSTEM, TASK]
        self.sent: set[str] = set()
        self.names: list[str] = []

    def turn(self, number: int) -> None:
        """One more message, with an old one dropped now and then; the answer is one of few."""
        body = [i for i, m in enumerate(self.history) if i > 1 and m["role"] == "user"]
        if len(body) > 1 and self.rng.random() < 0.6:
            del self.history[self.rng.choice(body[:-1])]
        text = "?" if self.rng.random() < 0.5 else f"{number} of {id(self) % 97}"
        self.history.append({"role": "user", "content": f"{text} {self.rng.randrange(4)}"})
        self.sent |= {m["content"] for m in self.history}
        turn = self.pool.send(self.history, max_new_tokens=1, do_sample=False, hint=self.hint)
        self.history.append({"role": "assistant", "content": turn.text})
        self.sent.add(turn.text)
        self.names.append(turn.session_id)


def leaks(walks: list[Walk], steps: int, seed: int) -> tuple[int, int]:
    """Turns that were answered by KV that has seen what the conversation never sent; and owners' turns."""
    rng = random.Random(seed)
    of, known = walks[0].pool, dict[str, set[str]]()  # what a session that knows more has seen
    found = 0
    for number in range(steps):
        walk = rng.choice(walks)
        walk.turn(number)
        name = walk.names[-1]
        window = of.session(name).window
        if at_least(weakest(slot.guarantee for slot in window.slots), "orbit"):
            known[name] = set(walk.sent)  # nothing but its own prompt
        else:
            known[name] = known.get(name, set()) | {m["content"] for m in walk.history}
            found += bool(known[name] - walk.sent)
    return found, of.metrics().by_owner


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2))
def test_interleaved_conversations_of_one_beginning_leak_nothing(seed):
    of = pool(speaking("headers"), max_sessions=4 + seed)
    rng = random.Random(seed)
    found, mine = leaks([Walk(rng, of) for _ in range(3)], 60, seed)
    assert found == 0 and mine > 5


@pytest.mark.slow
def test_a_thousand_interleavings_leak_nothing():
    mine = 0
    for seed in range(40):
        rng = random.Random(seed)
        of = pool(speaking("headers"), max_sessions=rng.randint(2, 8))
        found, ours = leaks([Walk(rng, of) for _ in range(rng.randint(2, 4))], 25, seed)
        assert found == 0
        mine += ours
    assert mine > 200


def test_two_agents_with_equal_answers_are_not_taken_for_each_other():
    of, said = pool(), {"role": "assistant", "content": ""}
    silent = {"max_new_tokens": 1, "forced_eos_token_id": int(seeing().builder.tokenize("<|im_end|>")[-1])}

    def turns(number: int) -> list[str]:
        """Guarantees of two turns; before the second a picture of its own leaves."""
        sent = [[SYSTEM, TASK, shot(number)], [SYSTEM, TASK, said, shot(5)]]
        return [of.send(history, do_sample=False, **silent).report.guarantee for history in sent]

    assert not at_least(turns(1)[1], "orbit") and of.metrics().by_owner == 1
    assert at_least(turns(2)[1], "orbit")  # its history is the other's now, its past is not
    third = of.send([SYSTEM, TASK, said, shot(5), said, shot(6)], do_sample=False, **silent)
    assert at_least(third.report.guarantee, "orbit") and of.metrics().by_owner == 1


def of(owner: tuple, anchor: tuple, messages: list[dict]) -> frozenset[str]:
    return tails_of(owner, anchor, messages, CallForm())


def test_a_tail_is_of_its_tenant_tools_hint_system_prompt_first_words_and_answers():
    said = [TASK, {"role": "assistant", "content": "a"}, shot(1), {"role": "assistant", "content": "b"}]
    tails = of(("", "", ""), ("x",), said)
    assert tails == of(("", "", ""), ("x",), [said[0], said[1], shot(2), said[3], TASK])
    others = [
        of(("t", "", ""), ("x",), said),
        of(("", "", "hint"), ("x",), said),
        of(("", "", ""), ("y",), said),
        of(("", "", ""), ("x",), [shot(1), *said[1:]]),
        of(("", "", ""), ("x",), said[:-1]),
    ]
    assert len(tails.union(*others)) == 12 and of((), (), [TASK]) == frozenset()
    long = [TASK, *[said[1]] * 9]
    assert len(of((), (), long) & of((), (), long[:-1])) == 1  # their number differs


@pytest.mark.parametrize("arguments", [{"to": 1}, '{"to":1}'], ids=["object", "text"])
def test_calls_in_text_and_apart_are_one_answer(arguments):
    function = {"name": "go", "arguments": arguments}
    call = {"id": "7", "type": "function", "function": function}
    text = 'on <tool_call>{"name": "go", "arguments": {"to": 1}}</tool_call>'
    apart = {"role": "assistant", "content": "on", "tool_calls": [call]}
    assert of((), (), [TASK, {"role": "assistant", "content": text}]) == of((), (), [TASK, apart])
