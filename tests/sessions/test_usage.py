"""Accounts of sessions and pools equal hooks on the model; a report counts a new system prompt once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool, testbed
from kamera.edits import Directive
from kamera.engines.hf import HfEngine
from tests.window.rig import borne, watching

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


def shown(picture, text: str = "What is the value of tag 3?") -> dict:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


# -- accounts --------------------------------------------------------------------------------------


@pytest.mark.few(1)
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


@pytest.mark.few(1)
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


# -- reports ---------------------------------------------------------------------------------------


# -- reuse -----------------------------------------------------------------------------------------
