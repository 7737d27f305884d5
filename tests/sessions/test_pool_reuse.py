"""Reuse in a pool: its sessions find each other's segments, tenants do not, and answers stay the same."""

from __future__ import annotations

import threading

import pytest

from kamera import ChunkStore
from kamera.sessions import SessionPool
from tests.content.templates import TALK
from tests.sessions.rig import EXACT, FULL, speaking

GREEDY = {"max_new_tokens": 3, "do_sample": False}
APART = 10_000
"""More tokens than any two prompts share: each request opens a session."""


def pool(store=None, policy=FULL, **options) -> SessionPool:
    given = ChunkStore.open("memory://") if store is None else store
    return SessionPool(speaking("headers"), given, policy=policy, **options)


def said(word: str) -> list[dict[str, str]]:
    """A conversation whose middle all of them have."""
    return [{"role": "user", "content": f"the {word} one"}, *TALK[1:]]


def test_a_session_finds_what_another_has_stored():
    store = ChunkStore.open("memory://")
    one, two = (pool(store, reuse=True) for _ in range(2))
    first, second = one.send(TALK, **GREEDY), two.send(TALK, **GREEDY)
    assert first.text == second.text
    assert {a.tier for a in one.session(first.session_id).state.admissions} == {"none"}
    assert {a.tier for a in two.session(second.session_id).state.admissions} == {"exact", "patched"}
    assert second.report.forwards == 0


def test_a_tenant_finds_nothing_of_another():
    stores = {name: ChunkStore.open("memory://", tenant=name) for name in ("a", "b")}
    one = pool(stores.__getitem__, reuse=True, min_tokens=APART)
    names = {who: one.send(TALK, tenant=who, **GREEDY).session_id for who in ("a", "b")}
    for who, name in names.items():
        assert {a.tier for a in one.session(name, who).state.admissions} == {"none"}


@pytest.mark.parametrize("policy", [EXACT, FULL], ids=["exact", "full rank"])
def test_threads_get_the_answers_of_sessions_without_it(policy):
    words = ["red", "blue", "green", "white"]
    alone = {word: pool(policy=policy).send(said(word), **GREEDY).text for word in words}
    one = pool(policy=policy, reuse=True, min_tokens=1)
    found: dict[tuple[int, str], str] = {}
    failed: list[BaseException] = []

    def ask(turn: int, word: str) -> None:
        try:
            found[turn, word] = one.send(said(word), **GREEDY).text
        except BaseException as error:  # shown below, in the test's own thread
            failed.append(error)

    for turn in range(2):
        threads = [threading.Thread(target=ask, args=(turn, word)) for word in words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    assert found == {(turn, word): alone[word] for turn in range(2) for word in words}
    assert one.metrics().failed == 0
