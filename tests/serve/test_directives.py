"""Leyline's channel over HTTP: directives, a mode and scratch messages on any request."""

from __future__ import annotations

import pytest

from kamera import ReusePolicy
from tests.serve.rig import SYSTEM, Served, as_chat, frames, plain, said, serving, user

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


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"directives": [{"start": 3, "end": 1}]}, "kamera.directives[0]"),
        ({"directives": [{"start": 0}]}, "kamera.directives[0].end"),
        ({"directives": [{"start": 0, "end": 9}]}, "messages 0:9 of a conversation of 4"),
        ({"directives": [{"start": 0, "end": 4}]}, "no message"),
        ({"directives": [{"start": 0, "end": 1, "unit": "words"}]}, "words"),
        ({"mode": "wild"}, "kamera.mode"),
        ({"scratch": ["x"]}, "kamera.scratch[0]"),
    ],
)
def test_what_makes_no_sense_is_a_400_that_says_where(served, own, place):
    answer = asked(served, TALK, **own)
    assert answer["status"] == 400 and place in answer["error"]["message"]
