"""The page at ``/`` of a server: a tenant's sessions as they go on, and nobody else's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.rig import KEY, OTHER, Served, as_chat, frames, plain, serving, user

CHAT = "/v1/chat/completions"


def ask(served: Served, session: str, *texts: str, key: str = KEY) -> None:
    messages = [as_chat(user(text, frames()[0])) for text in texts]
    body = {"model": "testbed", "max_tokens": 1, "messages": messages, "session_id": session}
    answer = served.post(CHAT, body, headers={"x-api-key": key})
    assert answer.status_code == 200, answer.text


def told(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    """The documents of a stream of events."""
    for line in stream.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def names(document: dict[str, Any]) -> list[tuple[str, int]]:
    return [(life["name"], len(life["deeds"])) for life in document["lives"]]


@pytest.fixture(scope="module")
def served():
    with serving(keys={KEY: "one", OTHER: "two"}) as found:
        yield found


def test_a_tenant_sees_its_own_sessions_as_they_go_on(served: Served):
    ask(served, "first", "a")
    ask(served, "theirs", "b", key=OTHER)
    with httpx.stream("GET", f"{served.url}/events", headers={"x-api-key": KEY}, timeout=60) as stream:
        documents = told(stream)
        assert names(next(documents)) == [("first", 1)]
        ask(served, "theirs", "b", "c", key=OTHER)
        ask(served, "second", "d")
        assert names(next(documents)) == [("second", 1)]  # what went on, and no more
        ask(served, "first", "a", "e")
        assert names(next(documents)) == [("first", 2)]
    with httpx.stream("GET", f"{served.url}/events", auth=("", OTHER), timeout=60) as stream:
        assert names(next(told(stream))) == [("theirs", 2)]


def test_a_browser_is_asked_for_a_key_and_no_other_origin_reads_without_keys(served: Served):
    for path in ("/", "/events"):
        answer = plain().get(served.url + path)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic ")
        assert plain().get(served.url + path, auth=("me", "no-key-of-anybody")).status_code == 401
        assert plain().get(served.url + path, headers={"authorization": "Basic %%%"}).status_code == 401
    assert b"theirs" not in plain().get(served.url + "/", auth=("me", KEY)).content
    with serving() as alone:
        body = {"model": "testbed", "messages": [user("x")]}
        for host in ("evil.example", "127.0.0.1.evil.example:80", "[::2]"):
            assert plain().get(alone.url + "/", headers={"host": host}).status_code == 403
            assert alone.post(CHAT, body, headers={"host": host}).status_code == 403
        assert plain().get(alone.url + "/", headers={"host": "localhost:1"}).status_code == 200
        # the server stops within the context, and the browser after it
