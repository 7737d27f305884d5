"""The command: one line when it is ready, an end that saves and says so, and what a restart finds."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kamera import ReusePolicy, testbed
from kamera.cli import main
from kamera.serve import Front, Within
from tests.serve.rig import SYSTEM, Served, as_chat, frames, said, serving, user

CHAT = "/v1/chat/completions"


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "kamera", "serve", "testbed", "--port", "0", "-q", *options]


def started(*options: str) -> tuple[subprocess.Popen, str]:
    """A server of its own process, and its address."""
    process = subprocess.Popen(
        command(*options), stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    line = process.stdout.readline()
    assert line.startswith("kamera serves on http://127.0.0.1:"), line
    return process, line.split()[-1]


def asked(url: str, messages: list, **options) -> dict:
    body = {"model": "testbed", "max_tokens": 4, "messages": list(map(as_chat, messages)), **options}
    return httpx.post(url + CHAT, json=body, timeout=60).json()


@pytest.mark.slow
def test_a_stopping_server_finishes_saves_and_says_so_and_the_next_one_goes_on(tmp_path: Path):
    first, store = [SYSTEM, user("value of tag 3?", frames()[0])], tmp_path / "store"
    process, url = started("--store", str(store))
    with process:
        before = asked(url, first)
        answer = before["choices"][0]["message"]
        client = {"model": "testbed", "max_output_tokens": 4, "instructions": testbed.SYSTEM}
        named = httpx.post(url + "/v1/responses", json={**client, "input": "value of tag 9?"}).json()
        body = {"model": "testbed", "max_tokens": 150, "stream": True, "messages": [user("value of tag 37?")]}
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)  # the answer is finished
        assert process.wait(60) == 0
        assert f"3 sessions saved in {store}" in process.stdout.read()
    with serving(store=store) as served:
        found = asked(served.url, [*first, answer, user("and 4?")])
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 30  # from the disk
        assert found["choices"][0]["message"]["content"] == said([*first, answer, user("and 4?")], 4)
        for session in ({}, {"session_id": before["kamera"]["session_id"]}):  # turns have outlived it, too
            turn = {"after": before["kamera"]["turn_id"], **session}
            found = asked(served.url, [user("and 5?")], kamera=turn)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 30
            assert found["choices"][0]["message"]["content"] == said([*first, answer, user("and 5?")], 4)
        assert served.post("/v1/responses", {}).status_code == 400
        follow = {"model": "testbed", "max_output_tokens": 4, "previous_response_id": named["id"]}
        found = served.post("/v1/responses", {**follow, "input": "and 10?"}).json()
        told = named["output"][0]["content"][0]["text"]
        talk = [user("value of tag 9?"), {"role": "assistant", "content": told}, user("and 10?")]
        assert found["output"][0]["content"][0]["text"] == said(talk, 4)  # without its instructions
        assert served.client().delete(f"/v1/responses/{named['id']}").status_code == 200
    with serving(store=store) as served:
        assert served.client().get(f"/v1/responses/{named['id']}").status_code == 404
        assert served.post("/v1/responses", {**follow, "input": "x"}).status_code == 400
        gone = {"after": named["kamera"]["turn_id"]}
        assert (
            served.post(CHAT, {"model": "testbed", "messages": [user("x")], "kamera": gone}).status_code
            == 404
        )


@pytest.mark.slow
def test_a_killed_server_loses_no_answer_but_the_last(tmp_path: Path):
    history, store = [SYSTEM], str(tmp_path / "store")
    for turn in range(4):
        process, url = started("--store", store)
        with process:
            for tag in range(3):
                history.append(user(f"value of tag {tag + 3 * turn}?"))
                answer = asked(url, history)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                prompt = answer["usage"]["prompt_tokens"]
                assert answer["choices"][0]["message"]["content"] == said(history, 4)
                # at most the exchange before the kill and the new one are prefilled
                assert cached >= prompt - 60 or len(history) == 2
                history.append(answer["choices"][0]["message"])
            process.kill()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "--keys"),
        (["--max-bytes", "many"], "no|size"),
        (["--mode", "wild"], "wild"),
        (["--engine", "http://localhost:1", "--reuse"], "--reuse"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(capfd, options, says):
    assert main(["serve", "testbed", *options]) == 2
    error = capfd.readouterr().err
    assert any(word in error for word in says.split("|"))


def dropping(served: Served, minimum: str | None) -> list[dict]:
    """The turns of a client that keeps two pictures, all under one least guarantee."""
    history, answers = [SYSTEM, user(f"Read tags, {minimum}.")], []
    options = {} if minimum is None else {"kamera": {"minimum": minimum}}
    for number in range(4):
        history.append(user(f"tag {number}?", frames()[number]))
        shots = [i for i, m in enumerate(history) if isinstance(m["content"], list)]
        if len(shots) > 2:
            del history[shots[0]]
        answer = asked(served.url, history, temperature=0, **options)
        answers.append({**answer, "plain": said(history, 4)})
        history.append(answer["choices"][0]["message"])
    return answers


@pytest.mark.slow
def test_a_request_may_ask_for_more_than_the_server_serves_by_itself():
    with serving(policy=ReusePolicy(), mode="amortize") as served:
        for pool in served.front.service._pools.values():
            pool.anticipates = False  # what idle time prepares makes a departure exact and cheap
        loose, strict = dropping(served, None), dropping(served, "patched")
        assert len({answer["kamera"]["session_id"] for answer in loose}) == 1
        assert loose[-1]["kamera"]["guarantee"] != "exact"
        assert loose[-1]["kamera"]["prefilled"] < strict[-1]["kamera"]["prefilled"]
        for answer in strict:
            assert answer["kamera"]["guarantee"] == "exact"
            assert answer["choices"][0]["message"]["content"] == answer["plain"]
        counts = dict(line.split() for line in httpx.get(served.url + "/metrics").text.splitlines())
        assert int(counts["kamera_by_owner"]) == 2 and int(counts["kamera_requests"]) == 8


def test_a_server_finds_what_other_conversations_had_behind_headers_of_their_own():
    rules = " ".join(f"tag {i} is read by camera {i % 7};" for i in range(40))
    with serving(policy=ReusePolicy("near", max_divergence=1.0), reuse=True) as served:
        ran = []
        for name in ("ann", "bob", "cyd"):
            head = {"role": "system", "content": f"You are {name}, an agent. {rules}"}
            usage = asked(served.url, [head, user("value of tag 3?")], temperature=0)["usage"]
            ran.append(1 - usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
            served.front.service._pools[""].flush()
    assert ran[0] > 0.95 and ran[2] <= 0.2


def test_the_options_of_a_pool_reach_it_and_each_request_is_a_line(monkeypatch, capsys):
    """Agents with headers of their own, on a server with room for two sessions; none listens on its port."""
    rules = " ".join(f"tag {i} is read by camera {i % 7};" for i in range(40))

    def ask(front: Front, listener: socket.socket, say: object) -> None:
        listener.close()
        service, within = front.service, Within(front.service)
        for name in ("ann", "bob", "cyd"):
            talk = [{"role": "system", "content": f"You are {name}, an agent. {rules}"}, user("tag 3?")]
            within.complete({"model": "testbed", "messages": talk, "max_tokens": 4, "temperature": 0})
            service._pools[""].flush()
        pool, counts = service._pools[""], service.counts("")
        assert counts["sessions"] == 2 and counts["evicted_count"] == 1 and pool.min_tokens == 7
        front.close()

    monkeypatch.setattr("kamera.serve.run", ask)
    bounds = ["--min-tokens", "7", "--max-sessions", "2", "--log-requests", "--port", "0", "-q"]
    log = logging.getLogger("kamera.sessions")
    before = [*log.handlers], log.level
    try:
        assert main(["serve", "testbed", "--reuse", "--minimum", "near", *bounds]) == 0
    finally:
        log.handlers, log.level = before
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("session ")]
    assert len(lines) == 3 and not any("camera" in line for line in lines)
    assert ": 0 of" in lines[0] and " near" in lines[2]
