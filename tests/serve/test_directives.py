"""Leyline's channel over HTTP: directives of all verbs, a mode and scratch messages on any request."""

from __future__ import annotations

import time

import pytest

from kamera import ReusePolicy
from kamera.content import Conversations
from kamera.serve import Refusal, Service, Within
from kamera.store import StoreAdmin
from tests.serve.rig import SYSTEM, Served, as_chat, backbone, frames, plain, said, serving, user
from tests.serve.test_engine import Recording

CHAT = "/v1/chat/completions"
TALK = [SYSTEM, user("value of tag 3?"), {"role": "assistant", "content": "red"}, user("value of tag 9?")]


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


def asked(served: Served, messages, path: str = CHAT, **own) -> dict:
    body = {"model": "testbed", "max_tokens": 6, "messages": messages, "kamera": own, "temperature": 0}
    answer = plain().post(served.url + path, json=body, timeout=60)
    return {**answer.json(), "status": answer.status_code}


def text(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_directive_edits_the_history_before_the_answer(served):
    gone = {"start": 1, "end": 3, "mode": "forget"}
    answer = asked(served, TALK, directives=[gone])
    assert text(answer) == said([SYSTEM, TALK[3]]) and answer["kamera"]["mode"] == "forget"
    # what follows the turn has the edited history
    after = asked(served, [user("and 12?")], after=answer["kamera"]["turn_id"])
    history = [SYSTEM, TALK[3], {"role": "assistant", "content": text(answer)}, user("and 12?")]
    assert text(after) == said(history)


def test_a_replacement_stands_in_place_of_what_it_replaces_in_every_unit(served):
    said_so = {"start": 1, "end": 2, "replacement": "value of tag 5?"}
    wanted = said([SYSTEM, user("value of tag 5?"), *TALK[2:]])
    assert text(asked(served, TALK, directives=[said_so])) == wanted
    anthropic = {"system": SYSTEM["content"], "messages": TALK[1:], "kamera": {"directives": [said_so]}}
    body = {"model": "testbed", "max_tokens": 6, "temperature": 0, **anthropic}
    (block,) = served.client().post("/v1/messages", json=body).json()["content"]
    assert block["text"] == wanted


def test_scratch_is_seen_by_one_answer_alone(served):
    note = user("The lamp is on.")
    answer = asked(served, TALK, scratch=[note])
    assert text(answer) == said([*TALK, note])
    after = asked(served, [user("and 12?")], after=answer["kamera"]["turn_id"])
    reply = {"role": "assistant", "content": text(answer)}
    assert text(after) == said([*TALK, reply, user("and 12?")])


def test_a_mode_is_that_of_the_clients_own_edit_of_a_turn():
    with serving(policy=ReusePolicy(minimum="survivor"), mode="amortize") as served:
        for pool in served.front.service._pools.values():
            pool.anticipates = False  # what idle time prepares makes a departure exact and cheap
        seen = [as_chat(user(f"tag {i}?", frame)) for i, frame in enumerate(frames()[:4])]
        reply = {"role": "assistant", "content": "red"}
        for own in ({}, {"mode": "forget"}):
            asked(served, [SYSTEM, seen[0], reply, seen[1], reply, seen[2]], session_id=str(own))
            answer = asked(
                served, [SYSTEM, seen[1], reply, seen[2], reply, seen[3]], session_id=str(own), **own
            )
            assert answer["kamera"]["guarantee"] == ("exact" if own else "survivor")


def test_a_decay_holds_for_a_client_that_sends_its_whole_history_and_is_saved_with_its_session(tmp_path):
    talk, name = list(TALK), {"session_id": "agent"}
    for start in range(2):  # the server ends and another goes on
        with serving(store=tmp_path) as served:
            for turn in range(2 * start, 2 * start + 2):
                own = (
                    {"directives": [{"start": 1, "end": 3, "verb": "decay", "turns": 2}]} if turn == 0 else {}
                )
                answer = asked(served, talk, **name, **own)
                seen = [SYSTEM, *talk[3:]] if turn == 3 else talk
                assert text(answer) == said(seen)
                assert answer["usage"]["prompt_tokens"] == tokens_of(seen)
                talk = [*talk, {"role": "assistant", "content": text(answer)}, user(f"and {turn}?")]


def tokens_of(messages) -> int:
    return Conversations(backbone().processor).render(messages).num_tokens


def test_spans_are_shared_and_pinned_by_any_api_and_evicted(tmp_path):
    with serving(store=tmp_path) as served:
        store = served.front.service._store_of("")
        pin = {"start": 1, "end": 2, "verb": "pin", "seconds": 600}
        evict = {"start": 2, "end": 4, "verb": "evict"}
        talk = [SYSTEM, user("value of tag 3? " * 12), *TALK[2:], TALK[2], user("So?")]
        anthropic = {"system": SYSTEM["content"], "messages": talk[1:], "max_tokens": 6, "temperature": 0}
        body = {"model": "testbed", **anthropic, "kamera": {"directives": [pin, evict]}}
        (block,) = served.client().post("/v1/messages", json=body).json()["content"]
        assert block["text"] == said([*talk[:2], *talk[4:]])
        pins = StoreAdmin(store).pins.list()
        assert pins and all(590 < pin.expires - time.time() <= 600 for pin in pins)
        share = {"start": 0, "end": 1, "verb": "share"}
        body = {"model": "testbed", "input": talk[1:2], "kamera": {"directives": [share]}}
        assert served.post("/v1/responses", {**body, "max_output_tokens": 2}).status_code == 200
        assert StoreAdmin(store).pins.list() == pins


def test_over_an_engine_what_needs_kv_is_refused_by_name_and_the_rest_is_done(tmp_path):
    engine = Recording()
    within = Within(Service(backbone(), ReusePolicy(), store=tmp_path, engine=engine))
    body = {"model": "m", "messages": TALK, "max_tokens": 4, "kamera": {"session_id": "one"}}
    for verb in ("share", "pin"):
        own = {"session_id": "one", "directives": [{"start": 1, "end": 2, "verb": verb}]}
        with pytest.raises(Refusal, match="share and pin: model and KV are an engine's") as refused:
            within.complete({**body, "kamera": own})
        assert refused.value.status == 400
    assert engine.prompts == []
    decay = {"start": 1, "end": 3, "verb": "decay", "turns": 0}
    within.complete({**body, "kamera": {"session_id": "one", "directives": [decay]}})
    longer = [*TALK, {"role": "assistant", "content": "x"}, user("and 12?")]
    within.complete({**body, "messages": longer})
    within._service.close()
    assert tokens_of([SYSTEM, *longer[3:]]) in [len(prompt.ids) for prompt in engine.prompts]


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"directives": [{"start": 3, "end": 1}]}, "kamera.directives[0]"),
        ({"directives": [{"start": 0}]}, "kamera.directives[0].end"),
        ({"directives": [{"start": 0, "end": 9}]}, "messages 0:9 of a conversation of 4"),
        ({"directives": [{"start": 0, "end": 4}]}, "no message"),
        ({"directives": [{"start": 0, "end": 1, "unit": "words"}]}, "words"),
        ({"directives": [{"start": 0, "end": 1, "verb": "forget"}]}, "verb"),
        ({"directives": [{"start": 1, "end": 2, "verb": "decay"}]}, "turns, seconds or both"),
        (
            {"directives": [{"start": 1, "end": 2, "verb": "decay", "turns": -1}]},
            "kamera.directives[0].turns",
        ),
        ({"directives": [{"start": 1, "end": 9, "verb": "decay", "turns": 1}]}, "messages 1:9 of"),
        ({"directives": [{"start": 1, "end": 9, "verb": "pin"}]}, "messages 1:9 of"),
        ({"directives": [{"start": 1, "end": 2, "verb": "pin", "turns": 1}]}, "leave it out"),
        ({"directives": [{"start": 1, "end": 2, "verb": "evict", "replacement": "x"}]}, "leave it out"),
        ({"mode": "wild"}, "kamera.mode"),
        ({"scratch": ["x"]}, "kamera.scratch[0]"),
    ],
)
def test_what_makes_no_sense_is_a_400_that_says_where(served, own, place):
    answer = asked(served, TALK, **own)
    assert answer["status"] == 400 and place in answer["error"]["message"]
