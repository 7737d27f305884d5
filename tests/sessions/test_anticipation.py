"""Anticipation: the next prompt's window is prepared after an answer, off the path of any request."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool, testbed
from kamera.edits import policies
from kamera.engines import calls_of
from kamera.engines.hf import HfEngine
from kamera.patches import background_of
from kamera.window import sequence_of
from tests.content.templates import screens
from tests.engines.compare import relative
from tests.models.hooks import add_hooks
from tests.sessions.rig import EXACT, FULL, plain_logits, seeing
from tests.window.rig import watching

DEFAULT = ReusePolicy()
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
ANSWER = 3  # forwards of an answer of four tokens behind its prompt
CLOSING = 3  # tokens that end an answer, which run with the next turn where they were not prepared
LONG = 300


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def frames() -> list:
    world = testbed.World(seed=3)
    return [frame.image for e in range(2) for frame in world.episode(e, legends=4).frames][:6]


@pytest.fixture(autouse=True)
def nothing_waits(backbone):
    yield
    background_of(backbone).flush()
    background_of(backbone).limit = 1 << 30


def shown(picture, text: str = "What is the value of tag 3?") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


def opened(backbone: HfEngine, policy: ReusePolicy = DEFAULT, **options: Any) -> ChatSession:
    return ChatSession(backbone, ChunkStore.open("memory://"), policy=policy, **options)


def new_tokens(session: ChatSession) -> int:
    """Tokens of the last turn: its message, and the opening of the answer."""
    opens = session.backbone.processor.tokenizer.convert_tokens_to_ids("<|im_start|>")
    return len(session.prompt_ids) - int((session.prompt_ids == opens).nonzero()[-2])


def before_the_answer(session: ChatSession, message, **options: Any) -> tuple[list[int], Any]:
    """Tokens of the forwards that a turn runs before the answer's first token, and the turn."""
    with watching(session.backbone) as seen:
        turn = session.send(message, **OPTIONS, **options)
    return seen.spans[: len(seen.spans) - ANSWER], turn


# -- a right guess ---------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("tiny", "policy", "keep"),
    [
        (False, DEFAULT, 1),
        (False, DEFAULT, 3),
        (False, ReusePolicy.exact(), 3),
        (True, DEFAULT, 3),
        (True, ReusePolicy.exact(), 1),
    ],
)
def test_an_agent_that_keeps_the_last_pictures_runs_its_new_tokens_alone(
    backbone, frames, tiny, policy, keep
):
    backbone, edit = seeing() if tiny else backbone, policies.keep_last_images(keep)
    plain, session = (opened(backbone, policy, edit_policy=edit, anticipates=a) for a in (False, True))
    for i, frame in enumerate(frames):
        without, want = before_the_answer(plain, shown(frame))
        spans, turn = before_the_answer(session, shown(frame))
        if i < keep:
            assert turn.report.anticipated is None
        else:
            assert spans == [new_tokens(session)] != without
            assert turn.report.anticipated == sum(without) - sum(spans)
        assert turn.report.guarantee == want.report.guarantee == "exact"
        assert turn.report.left == want.report.left
        assert turn.text == want.text
        assert torch.equal(session.prompt_ids, plain.prompt_ids)
        session.anticipate()
        session.flush()
        plain.flush()
    assert torch.allclose(session.next_token_logits(), plain.next_token_logits(), atol=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [EXACT, FULL], ids=["exact", "patches"])
def test_random_edits_of_a_tiny_model_are_answered_as_the_plain_model_does(policy):
    """Each turn edits the history as the one before, or otherwise: guesses are right, wrong, or none."""
    backbone, rng = seeing(), random.Random(0)
    session = ChatSession(backbone, ChunkStore.open("memory://"), policy=policy, mode="forget")
    clients = [
        policies.keep_last_images(1),
        policies.keep_last_images(2),
        lambda messages, _: list(messages)[-3:],
        policies.keep_all(),
    ]
    history: list[dict[str, Any]] = []
    found: list[int | None] = []
    client = clients[0]
    for step in range(16):
        client = client if rng.random() < 0.7 else rng.choice(clients)
        history = client([*history, screens(1, step)[1]], 0)
        want = plain_logits(backbone, history)
        turn = session.send(history, max_new_tokens=2, do_sample=False)
        found.append(turn.report.anticipated)
        assert turn.report.guarantee == "exact"
        assert relative(session.fork().next_token_logits(history), want) <= 1e-4
        history = [*history, {"role": "assistant", "content": turn.text}]
        session.anticipate()
        background_of(backbone).flush()
    assert {None, 0} < set(found), "some were right, some wrong, some turns had none"


# -- a wrong one -----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [DEFAULT, ReusePolicy.exact(), ReusePolicy()])
def test_a_wrong_guess_serves_nothing(backbone, frames, policy):
    """The policy lets the oldest picture go, but the client takes away another first."""
    edit = policies.keep_last_images(3)
    plain, session = (opened(backbone, policy, edit_policy=edit, anticipates=a) for a in (False, True))
    for one in (plain, session):
        for frame in frames[:3]:
            one.send(shown(frame), **OPTIONS)
    session.anticipate()
    for one in (plain, session):
        one.flush()
    history = session.messages
    assert plain.messages[1::2] == history[1::2]
    edited = [history[0], history[1], *history[4:], shown(frames[3])]  # the second turn leaves
    without, want = before_the_answer(plain, edited)
    spans, turn = before_the_answer(session, edited)
    assert turn.report.anticipated == 0
    assert (spans, turn.text, turn.report.guarantee) == (without, want.text, want.report.guarantee)
    ignored = {"anticipated": 0, "seconds": 0.0, "first_token": 0.0}
    assert {**vars(turn.report), **ignored} == {**vars(want.report), **ignored}
    assert torch.equal(sequence_of(session.window).input_ids, sequence_of(plain.window).input_ids)


def test_what_was_prepared_is_of_one_history_alone(backbone, frames):
    session = opened(backbone, edit_policy=policies.keep_last_images(1))
    for frame in frames[:2]:
        session.send(shown(frame), **OPTIONS)
    session.anticipate()
    session.flush()
    branch = session.fork()
    assert branch.send(shown(frames[2]), **OPTIONS).report.anticipated is None, "a fork has its own"
    session.edit([])
    assert session.send(shown(frames[2]), **OPTIONS).report.anticipated is None, "an edit used it up"


# -- requests, memory, pools -----------------------------------------------------------------------


def test_a_request_ends_the_work_at_its_next_layer_and_waits_for_nothing_else(backbone, frames, monkeypatch):
    monkeypatch.setattr("kamera.engines.work.PATIENCE", LONG)
    session = opened(backbone, edit_policy=policies.keep_last_images(2), anticipates=False)
    for frame in frames[:3]:
        session.send(shown(frame), **OPTIONS)
    session.flush()
    queue, begun, seen = background_of(backbone), threading.Event(), []

    def at_layer(index: int) -> None:
        seen.append(f"ahead {index}" if queue.is_own_thread else "call")
        if queue.is_own_thread and not begun.is_set():
            begun.set()
            end = time.monotonic() + LONG
            while not calls_of(backbone).must_give_way and time.monotonic() < end:
                time.sleep(0.001)

    layers = backbone.decoder.layers
    hooks = [(m.register_forward_pre_hook, lambda *_, i=i: at_layer(i)) for i, m in enumerate(layers)]
    handles = add_hooks(backbone, *hooks)
    try:
        session.anticipate()
        assert begun.wait(LONG)
        turn = session.send(shown(frames[3]), **OPTIONS)
    finally:
        for handle in handles:
            handle.remove()
    session.flush()
    assert turn.report.anticipated is None
    expected = ["ahead 0", *["call"] * len(layers) * (1 + ANSWER)]
    assert seen[: len(expected)] == expected and "call" not in seen[len(expected) :]


@pytest.mark.few(1)
@pytest.mark.parametrize("anticipates", [True, False])
def test_a_pool_prepares_after_each_answer_and_counts_right_and_wrong_guesses(backbone, frames, anticipates):
    with watching(backbone, later=True) as seen:
        pool = SessionPool(
            backbone,
            ChunkStore.open("memory://"),
            policy=DEFAULT,
            edit_policy=policies.keep_last_images(2),
            anticipates=anticipates,
        )
        for frame in frames[:5]:
            turn = (
                pool.send(shown(frame), session_id="agent", **OPTIONS)
                if frame is not frames[0]
                else (pool.send([shown(frame)], session_id="agent", **OPTIONS))
            )
            pool.flush()
        history = pool.session("agent").messages
        pool.send([*history[:2], *history[6:], shown(frames[5])], session_id="agent", **OPTIONS)
        pool.flush()
    counts = pool.metrics()
    assert (counts.anticipated, counts.misjudged) == ((3, 1) if anticipates else (0, 0))
    assert bool(turn.report.anticipated) is anticipates
    usage = pool.usage()
    assert usage.now.forwards + usage.background.forwards == seen.forwards
    assert usage.now.tokens + usage.background.tokens == seen.tokens
    assert usage.now.vision_encodes + usage.background.vision_encodes == seen.encodes
