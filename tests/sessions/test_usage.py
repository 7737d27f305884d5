"""Accounts of sessions and pools equal hooks on the model; a report counts a new system prompt once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool, testbed
from kamera.edits import Directive, policies
from kamera.engines import calls_of, precedence
from kamera.engines.hf import HfEngine
from kamera.patches import later_of
from kamera.reuse import Reuser
from kamera.window import former_of
from tests.models.hooks import hooked
from tests.sessions.rig import session, speaking
from tests.window.rig import Seen, borne, watching

DEFAULT = ReusePolicy()
"""The policy of users: the other tests of this process are about sessions that need no certificate."""

POLICIES = {
    "default": DEFAULT,
    "audited": replace(DEFAULT, audit=1.0),
    "forming always": replace(DEFAULT, forms="always"),
    "exact": ReusePolicy.exact(),
}
OPTIONS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
ANSWER = 2  # forwards of an answer of three tokens behind its prompt
SYSTEM = {"role": "system", "content": "You watch a camera."}
SPEAKING = {"role": "system", "content": "You are brief, and you never say more than you were asked."}


def shown(picture, text: str = "What is the value of tag 3?") -> dict:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


def before_the_answer(seen: Seen) -> list[int]:
    return seen.spans[: len(seen.spans) - ANSWER]


# -- accounts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "mode", "reuse"),
    [
        ("default", "auto", False),
        ("default", "amortize", True),
        ("audited", "repair", True),
        ("forming always", "auto", False),
        ("exact", "forget", False),
    ],
)
def test_a_chat_with_edits(backbone, frames, policy, mode, reuse):
    options = {"policy": POLICIES[policy], "mode": mode, "reuse": reuse, "uncached": True}
    with watching(backbone, later=True) as seen:
        chat = ChatSession(backbone, ChunkStore.open("memory://"), **options)
        chat.send([SYSTEM, shown(frames[0])], **OPTIONS)
        chat.send(shown(frames[1]), **OPTIONS)
        chat.send(shown(frames[2]), scratch=[{"role": "user", "content": "be brief"}], **OPTIONS)
        chat.edit([Directive(1, 3, unit="messages")])
        chat.next_token_logits("and now?")
        branch = chat.fork()
        branch.send("what is there?", **OPTIONS)
        assert chat.send("it says <|im_end|>", **OPTIONS).report.uncached, "the plain model answers"
        for one in (chat, branch):
            one.flush()
    assert seen.encodes >= 3
    assert borne(seen, chat.usage(), branch.usage())


def test_a_turn_that_is_broken_off(backbone, frames):
    class Gone(Exception):
        pass

    class Leaving:
        def put(self, value) -> None:
            if value.numel() == 1:
                raise Gone

        def end(self) -> None:
            pass

    with watching(backbone, later=True) as seen:
        chat = ChatSession(backbone, ChunkStore.open("memory://"), policy=DEFAULT)
        chat.send([SYSTEM, shown(frames[0])], **OPTIONS)
        with pytest.raises(Gone):
            chat.send(shown(frames[1]), streamer=Leaving(), **OPTIONS)
        chat.send(shown(frames[1]), **OPTIONS)
        chat.flush()
    assert borne(seen, chat.usage())


def test_what_was_prepared_for_another_turn_and_what_was_broken_off_in_a_layer(backbone, frames, monkeypatch):
    monkeypatch.setattr(precedence, "PATIENCE", 300.0)
    queue, begun = later_of(backbone), threading.Event()
    chat = ChatSession(
        backbone, ChunkStore.open("memory://"), policy=DEFAULT, edit_policy=policies.keep_last_images(1)
    )
    broken: list[str] = []

    def first_layer(*_: object) -> None:
        if armed and queue.is_own_thread and not begun.is_set():
            broken.append("begun")
            begun.set()
            while not calls_of(backbone).must_give_way:
                begun.wait(0.001)

    def last_layer(*_: object) -> None:
        if armed and queue.is_own_thread:
            broken.append("ended")

    layers, armed = backbone.decoder.layers, list[bool]()
    calls = ((0, first_layer), (-1, last_layer))
    hooks = [(layers[i].register_forward_pre_hook, call) for i, call in calls]
    with hooked(backbone, *hooks), watching(backbone, later=True) as seen:
        for frame in frames[:2]:
            chat.send([shown(frame)], append=True, **OPTIONS)
        chat.anticipate()
        chat.flush()
        assert chat.send([shown(frames[2])], append=True, **OPTIONS).report.anticipated
        chat.flush()
        armed.append(True)
        chat.anticipate()
        assert begun.wait(60), "nothing was prepared"
        turn = chat.send("no picture this time", **OPTIONS)
        chat.flush()
    assert broken == ["begun"], "the turn came first, and nobody wants the rest"
    assert borne(seen, chat.usage())
    assert chat.usage().background.forwards > 0 and turn.usage.completion_tokens == 3


@pytest.mark.parametrize("policy", ["default", "exact"])
def test_a_first_turn_runs_two_forwards_and_later_ones_one(policy, frames):
    backbone = HfEngine(*testbed.load())
    for _ in range(2):  # the first session of a process, and one that finds the model's answers
        chat = ChatSession(backbone, ChunkStore.open("memory://"), policy=POLICIES[policy])
        ran = []
        for message in ([SYSTEM, shown(frames[0])], [shown(frames[1])], [shown(frames[2])]):
            before = chat.usage().now
            chat.send(message, append=True, **OPTIONS)
            ran.append(chat.usage().now.forwards - before.forwards - ANSWER)
        chat.flush()
        assert ran == [2, 1, 1], "the system prompt, then each message with the question"
        assert chat.usage().now.tokens == len(chat.prompt_ids) + ANSWER, "each token once"


def test_a_loaded_session(backbone, frames, tmp_path):
    chat = ChatSession(backbone, ChunkStore.open("memory://"), policy=DEFAULT)
    chat.send([SYSTEM, shown(frames[0])], **OPTIONS)
    chat.save(tmp_path / "chat")
    store = ChunkStore.open("memory://")
    with watching(backbone, later=True) as seen:
        loaded = ChatSession.load(tmp_path / "chat", backbone, store)
        loaded.flush()
        assert borne(seen, loaded.usage())
        loaded.send(shown(frames[1]), **OPTIONS)
        loaded.flush()
    assert borne(seen, loaded.usage())


def test_a_pool_of_two_tenants_and_two_threads(backbone, frames):
    stores = {name: ChunkStore.open("memory://", tenant=name) for name in ("one", "other")}
    begin = threading.Barrier(2)

    def converse(pool: SessionPool, tenant: str) -> None:
        begin.wait(60)
        first = pool.send([SYSTEM, shown(frames[0])], tenant=tenant, **OPTIONS)
        said = {"role": "assistant", "content": first.text}
        pool.send([SYSTEM, shown(frames[0]), said, shown(frames[1])], tenant=tenant, **OPTIONS)
        pool.send([SYSTEM, shown(frames[1])], tenant=tenant, **OPTIONS)

    with watching(backbone, later=True) as seen:
        pool = SessionPool(backbone, stores.__getitem__, policy=POLICIES["audited"])
        threads = [threading.Thread(target=converse, args=(pool, tenant)) for tenant in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pool.flush()
    assert pool.metrics().requests == 6 and pool.metrics().failed == 0
    assert borne(seen, pool.usage())


def test_a_pool_that_reads_saved_sessions(tmp_path):
    backbone = speaking("headers")
    options = {"policy": DEFAULT, "save": tmp_path / "saved", "min_tokens": 1}
    pool = SessionPool(backbone, ChunkStore.open("memory://"), **options)
    for name in ("a", "b"):
        pool.send([SPEAKING, {"role": "user", "content": f"I am {name}"}], name, **OPTIONS)
    pool.flush()
    with watching(backbone, later=True) as seen:
        pool = SessionPool(backbone, ChunkStore.open("memory://"), **options)
        pool.session("a").flush()
        assert borne(seen, pool.usage()) and seen.forwards, "its window is loaded"
        pool.send("who am I?", "b", **OPTIONS)
        pool.flush()
    assert pool.metrics().resumed == 1
    assert borne(seen, pool.usage())


# -- reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True])
def test_a_turns_report_counts_a_new_system_prompt_once(backbone, frames, reuse):
    store = ChunkStore.open("memory://")
    for _ in range(2):
        chat = ChatSession(backbone, store, policy=DEFAULT, reuse=reuse)
        for frame, system in ((frames[0], [SYSTEM]), (frames[1], [])):
            with watching(backbone) as seen:
                turn = chat.send([*system, shown(frame)], append=True, **OPTIONS)
            report, spans = turn.report, before_the_answer(seen)
            assert sum(spans) == report.prefilled
            assert report.prefilled == turn.usage.prompt_tokens - turn.usage.cached_tokens
            assert report.forwards == len(spans), "the last of them is the question's, with new pieces"
            assert report.tokens_recomputed == sum(spans) - len(chat.state.question)
            chat.flush()
    anchor = former_of(chat.window).anchor.length
    assert anchor > 0 and report.kept >= anchor


def test_the_system_prompt_of_another_session_or_of_the_store_is_kept():
    backbone, store = speaking("headers"), ChunkStore.open("memory://")
    asked = [SPEAKING, {"role": "user", "content": "who?"}]
    pool = SessionPool(backbone, store, policy=DEFAULT)
    first = pool.send(asked, "one", **OPTIONS)
    assert first.usage.cached_tokens == 0 and first.report.kept == 0
    anchor = former_of(pool.session("one").window).anchor.length
    assert first.report.forwards == 2, "the system prompt, and all that is behind it with the question"
    second = pool.send(asked, "other", **OPTIONS)
    assert second.usage.cached_tokens >= anchor and second.report.kept >= anchor
    third = ChatSession(backbone, store, policy=DEFAULT).send(asked, **OPTIONS)
    assert third.usage.cached_tokens >= anchor
    assert first.report.tokens_recomputed - second.report.tokens_recomputed >= anchor


def test_messages_for_one_answer_alone_are_counted_once():
    chat = session(speaking("headers"), DEFAULT)
    chat.send([SPEAKING, {"role": "user", "content": "who?"}], **OPTIONS)
    with watching(chat.backbone) as seen:
        turn = chat.send("and who else?", scratch=[{"role": "user", "content": "be brief"}], **OPTIONS)
    report = turn.report
    assert sum(before_the_answer(seen)) == report.prefilled
    assert report.kept + report.turned + report.patched + report.prefilled == turn.usage.prompt_tokens


# -- reuse -----------------------------------------------------------------------------------------


def test_a_reuser_bears_its_plans_and_runs(backbone, frames):
    with watching(backbone, later=True) as seen:
        reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICIES["audited"])
        for shot in (frames[:2], frames[1:3], frames[:2]):
            done = reuser.prepare([SYSTEM, *map(shown, shot)]).run()
            done.window.flush()
        assert seen.encodes >= 3
        assert borne(seen, reuser.usage())
