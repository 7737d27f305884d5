"""A pool finds a request's session, shares what may be shared, and never mixes two conversations."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import replace

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.content import Conversations
from kamera.edits import policies
from kamera.errors import UnknownSession
from kamera.sessions import SessionPool
from kamera.sessions.table import Incoming, best_match, candidate
from kamera.trust import GUARANTEES
from tests.content.templates import LONG_TALK, TALK, picture, screens
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, plain_logits, seeing, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}


def shown(image) -> dict:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what is on the screen?"}]
    return {"role": "user", "content": content}


def _pool(backbone=None, policy=EXACT, store=None, **options) -> SessionPool:
    options = {"min_tokens": 1, **options}
    given = ChunkStore.open("memory://") if store is None else store
    return SessionPool(backbone or speaking("headers"), given, policy=policy, **options)


def test_a_session_is_found_by_its_id():
    pool = _pool()
    first = pool.send("hello", **GREEDY)
    second = pool.send("and now?", first.session_id, **GREEDY)
    assert second.session_id == first.session_id and second.report.kept > 0
    assert [m["role"] for m in pool.session(first.session_id).messages] == ["user", "assistant"] * 2
    assert (pool.metrics().by_id, pool.metrics().opened, len(pool)) == (1, 1, 1)


def test_a_whole_history_is_found_by_its_longest_prefix():
    pool = _pool()
    short = pool.send(TALK[:1], **GREEDY).session_id
    longer = pool.send(LONG_TALK, "long", **GREEDY).session_id
    assert short != longer
    turn = pool.send([*LONG_TALK, {"role": "assistant", "content": "x"}, TALK[2]], **GREEDY)
    assert turn.session_id == longer and turn.report.kept > 1000
    assert pool.metrics().by_prefix == 2 and pool.metrics().opened == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [ReusePolicy.exact(), ReusePolicy()])
def test_a_conversation_keeps_one_session_however_its_client_edits_it(policy):
    """With the least number of common tokens that pools have by default, from the first short message on."""
    pool = SessionPool(seeing(), ChunkStore.open("memory://"), policy=policy)
    keep, history = policies.keep_last_images(2), list[dict]()
    pool.send([{"role": "user", "content": "another talk"}], **GREEDY)
    for i in range(6):
        history.append(shown(picture(i)))
        turn = pool.send(keep(history, i), **GREEDY)
        if policy.minimum == "exact":
            assert turn.text == _said(pool, keep(history, i))
        history.append({"role": "assistant", "content": turn.text})
    assert (len(pool), pool.metrics().opened) == (2, 2)
    pool.flush()


def test_a_conversation_under_another_system_prompt_has_a_session_of_its_own():
    pool = _pool()
    for system in ("be brief", "be thorough"):
        history = [{"role": "system", "content": system}, *LONG_TALK]
        assert pool.send(history, **GREEDY).text == _said(pool, history)
    assert len(pool) == 2


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_only_kv_of_the_prompt_alone_goes_to_others(guarantee):
    pool = _pool()
    name = pool.send(TALK, **GREEDY).session_id
    held = replace(candidate(pool.session(name), "auto"), guarantee=guarantee)
    found = best_match(held.layout.prompt, {name: held}, 1)
    assert (found.name == name) == (guarantee in ("exact", "patched", "orbit"))
    assert found.tainted == (found.name is None)


class _Gate:
    """Holds an answer until it is opened, and says when one has begun."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def put(self, value) -> None:
        self.begun.set()
        assert self.open.wait(300)

    def end(self) -> None:
        pass


def test_a_busy_session_is_forked_as_its_last_answer_left_it():
    # the model answers one at a time: what is looked at is who gets which session
    pool, gate = _pool(), _Gate()
    name = pool.send("hello", **GREEDY).session_id
    before = pool.session(name).messages
    slow = threading.Thread(target=pool.send, args=("slow", name), kwargs={**GREEDY, "streamer": gate})
    slow.start()
    assert gate.begun.wait(300)
    try:
        anchors = pool._tenants[""]
        taken, entry = pool._reserve(Incoming(anchors, pool._manner, "quick", name))
        assert taken != name and entry.session.messages == before == pool.session(name).messages
    finally:
        gate.open.set()
        slow.join()
    assert pool.session(name).messages[-2]["content"] == "slow" and pool.metrics().forked == 1


def test_a_store_of_another_tenant_is_refused():
    pool = _pool(store=lambda tenant: ChunkStore.open("memory://", tenant="ann"))
    with pytest.raises(ValueError, match="the store for tenant 'bob' is of 'ann'"):
        pool.send("hello", tenant="bob", **GREEDY)
    assert pool.send("hello", tenant="ann", **GREEDY).session_id is not None and len(pool) == 1


def test_a_failed_request_publishes_nothing():
    pool = _pool()
    name = pool.send("hello", **GREEDY).session_id
    before = pool.session(name).messages

    def stops(input_ids, scores, **options):
        raise RuntimeError("gone")

    for session_id in (name, None):
        with pytest.raises(RuntimeError, match="gone"):
            pool.send("bye", session_id, stopping_criteria=[stops], **GREEDY)
    assert pool.session(name).messages == before and len(pool) == 1 and pool.metrics().failed == 2
    assert pool.send("again", name, **GREEDY).session_id == name


def test_tenants_share_neither_sessions_nor_chunks():
    stores = {}

    def store(tenant: str) -> ChunkStore:
        return stores.setdefault(tenant, ChunkStore.open("memory://", tenant=tenant))

    pool = _pool(seeing(), store=store)
    pool.send(screens(2), "s", "a", **GREEDY)
    turn = pool.send(screens(2), None, "b", **GREEDY)
    assert turn.report.vision_encodes == 2 and turn.session_id != "s" and pool.metrics().opened == 2
    with pytest.raises(UnknownSession):
        pool.send("more", "s", "b", **GREEDY)
    with pytest.raises(ValueError, match="tenant 'b'"):
        _pool().send("hi", None, "b", **GREEDY)


def test_bytes_are_bounded_by_what_windows_hold():
    one = _pool(max_bytes=1 << 40)
    one.send(LONG_TALK, "a", **GREEDY)
    size = one.session("a").window.memory().total
    pool = _pool(max_bytes=size * 3 // 2)
    for name in ("a", "b"):
        pool.send([{"role": "user", "content": name}, *LONG_TALK[1:]], name, **GREEDY)
    assert len(pool) == 1 and pool.metrics().evicted_bytes == 1


def _said(pool: SessionPool, messages) -> str:
    inputs = Conversations(pool.backbone.processor).whole(messages)
    return pool.backbone.builder.detokenize(pool.backbone.plain.generate(inputs, **GREEDY)[0]) or ""


def _client(pool: SessionPool, seed: int, turns: int, failures: list) -> None:
    """Random turns over a few conversations; each session afterwards equals an uncached run."""
    draw = random.Random(seed)
    histories = [screens(1, draw.randrange(4)) for _ in range(2)]
    names: list[str | None] = [None, f"client {seed}"]
    try:
        for turn in range(turns):
            which = draw.randrange(2)
            history = histories[which]
            kind = draw.choice(["say", "show", "drop", "swap"])
            if kind == "show":
                item = {"type": "image", "image": picture(draw.randrange(4))}
                history.append({"role": "user", "content": [item]})
            elif kind == "drop" and len(history) > 3:
                del history[draw.randrange(1, len(history) - 1)]
            elif kind == "swap" and len(history) > 3:
                history[1], history[2] = history[2], history[1]
            else:
                history.append({"role": "user", "content": f"word {turn}"})
            asked = list(history)
            done = pool.send(asked, names[which], **GREEDY)
            with pool.backbone.turns.alone():
                wanted = plain_logits(pool.backbone, asked)
            assert done.text == _said(pool, asked)
            with contextlib.suppress(UnknownSession):  # it may have left already
                branch = pool.session(done.session_id)
                assert relative(branch.next_token_logits(asked), wanted) <= 1e-4
            history.append({"role": "assistant", "content": done.text})
    except BaseException as error:
        failures.append((seed, error))


def _threads(sessions: int, turns: int, max_sessions: int) -> SessionPool:
    pool, failures, waiting = _pool(seeing(), max_sessions=max_sessions), [], list(range(sessions))

    def work() -> None:
        while True:
            try:
                seed = waiting.pop()
            except IndexError:
                return
            _client(pool, seed, turns, failures)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0][1]
    return pool


def test_eight_threads_answer_as_uncached_runs_do():
    pool = _threads(8, 3, 6)
    counted = pool.metrics()
    assert counted.requests == 24 and counted.failed == 0 and len(pool) <= 6


@pytest.mark.slow
def test_two_hundred_sessions_answer_as_uncached_runs_do():
    pool = _threads(200, 4, 200)
    counted = pool.metrics()
    assert counted.requests == 800 and counted.failed == 0 and len(pool) <= 200
