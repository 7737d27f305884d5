"""Malformed and hostile requests get a 4xx that names what is wrong, keys see nothing of each other."""

from __future__ import annotations

import base64
import json
import socket
import sqlite3
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kamera.cli.serve import read_keys
from kamera.serve import Limits
from kamera.serve.refusal import refusal_of
from tests.serve.rig import KEY, OTHER, Served, backbone, plain, serving, user

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [user("x")]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> str:
    """A small PNG of very many pixels."""
    rows = zlib.compress(bytes(1 << 20), 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def shown(url: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def pictured(source: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image", "source": source}]}]


def png_url(data: str) -> str:
    return "data:image/png;base64," + data


CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "no messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": ["x"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": ["bob"]}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "content[0].type"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    (CHAT, {"messages": [user("a <|im_end|> b")]}, "special"),
    (CHAT, {"messages": shown("https://example.com/a.png")}, "nothing is fetched"),
    (CHAT, {"messages": shown("file:///etc/passwd")}, "nothing is fetched"),
    (CHAT, {"messages": shown("http://169.254.169.254/")}, "nothing is fetched"),
    (CHAT, {"messages": shown(png_url("%%%"))}, "no picture in base64"),
    (CHAT, {"messages": shown(png_url("AAAA"))}, "no picture in base64"),
    (CHAT, {"messages": shown(png_url(bomb(60_000, 60_000)))}, "pixels"),
    (CHAT, {"messages": shown(png_url(bomb(6_000, 6_000)))}, "cannot be read"),
    (CHAT, {"messages": shown(7)}, "image_url.url"),
    (CHAT, {"messages": USER, "temperature": 9}, "temperature"),
    (CHAT, {"messages": USER, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": USER, "temperature": True}, "temperature"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 10**30}, "max_tokens"),
    (CHAT, {"messages": USER, "top_p": -1}, "top_p"),
    (CHAT, {"messages": USER, "seed": 2**64}, "seed"),
    (CHAT, {"messages": USER, "stop": ["a", ""]}, "stop"),
    (CHAT, {"messages": USER, "stop": ["a"] * 99}, "stop"),
    (CHAT, {"messages": USER, "n": 2}, "n is 2"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "logprobs: true"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "0 to 20"),
    (RESPONSES, {"input": "x", "include": ["file_search_call.results"]}, "include"),
    (CHAT, {"messages": USER, "frequency_penalty": 0.5}, "frequency_penalty"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    (
        CHAT,
        {"messages": USER, "tools": [{"type": "function", "function": {"name": "a"}}]},
        "does not show tools",
    ),
    (CHAT, {"messages": USER, "whatever": 1}, "whatever"),
    (CHAT, {"messages": USER, "x" * 3000: 1}, "xxx"),
    (CHAT, {"messages": USER, "stream": "yes"}, "stream"),
    (CHAT, {"messages": USER, "stream_options": {"x": 1}}, "stream_options.x"),
    (CHAT, {"messages": USER, "kamera": {"minimum": "perfect"}}, "kamera.minimum"),
    (CHAT, {"messages": USER, "kamera": {"policy": 1}}, "kamera.policy"),
    (CHAT, {"messages": USER, "session_id": "a\nb"}, "session_id"),
    (CHAT, {"messages": USER, "session_id": "a" * 999}, "session_id"),
    (CHAT, {"messages": USER, "metadata": nested(60)}, "levels"),
    (CHAT, {"messages": USER, "metadata": nested(40)}, "metadata"),
    (CHAT, {"messages": [user("a" * 300_000)]}, "positions"),
    (CHAT, {"messages": USER, "model": 3}, "model"),
    (MESSAGES, {"messages": USER}, "max_tokens"),
    (MESSAGES, {"messages": [{"role": "system", "content": "x"}], "max_tokens": 1}, "role"),
    (MESSAGES, {"messages": [{"role": "user"}], "max_tokens": 1}, "content"),
    (
        MESSAGES,
        {"messages": pictured({"type": "url", "url": "http://a/b.png"}), "max_tokens": 1},
        "source.type",
    ),
    (MESSAGES, {"messages": pictured({"type": "base64", "data": "?"}), "max_tokens": 1}, "source.data"),
    (MESSAGES, {"messages": pictured(None), "max_tokens": 1}, "source"),
    (MESSAGES, {"messages": USER, "max_tokens": 1, "thinking": {"type": "enabled"}}, "thinking"),
    (MESSAGES, {"messages": USER, "max_tokens": 1, "system": [{"type": "image"}]}, "system[0].type"),
    (MESSAGES, {"messages": USER, "max_tokens": 1, "mcp_servers": [1]}, "mcp_servers"),
    (
        MESSAGES,
        {"messages": USER, "max_tokens": 1, "context_management": {"edits": [{"type": "x"}]}},
        "edits[0].type",
    ),
    (
        MESSAGES,
        {"messages": USER, "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0].type",
    ),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": "x", "previous_response_id": "../../etc/passwd"}, "is not here"),
    (RESPONSES, {"input": "x", "conversation": "c"}, "conversation"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (
        RESPONSES,
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
        "arguments",
    ),
]


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


@pytest.mark.few(13)
@pytest.mark.parametrize(("path", "body", "says"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_malformed_or_not_supported_is_named(served: Served, path, body, says):
    answer = served.post(path, {"model": "testbed", **body})
    error = answer.json()["error"]
    assert 400 <= answer.status_code < 500, answer.text
    assert says in error["message"] and len(error["message"]) < 500


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"x"', 400),
        (b"\xff\xfe", 400),
        (b'{"model": NaN}', 400),
        (b'{"a": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400),
        (b'{"model": "testbed", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"model": "\\u0000", "messages": [{"role": "user", "content": "x"}]}', 404),
        (b'{"a": "' + b"x" * Limits().body + b'"}', 413),
    ],
)
def test_a_body_that_is_none_is_refused(served: Served, data, status):
    kind = {"content-type": "application/json"}
    assert plain().post(served.url + CHAT, content=data, headers=kind, timeout=60).status_code == status


def test_what_a_request_may_bring_is_bounded_by_options():
    small = png_url(bomb(1_000, 1_000))
    with serving(limits=Limits(body=20_000, messages=3, pixels=2_500_000)) as served:
        for messages, status, says in (
            (USER * 4, 400, "messages has 4, more than 3"),
            (shown(small) * 3, 400, "3 pictures of 3000000 pixels, more than 2500000"),
            ([user("x" * 20_000)], 413, "more than 20000 bytes"),
            (USER * 3, 200, None),
        ):
            answer = served.post(CHAT, {"model": "testbed", "messages": messages, "max_tokens": 1})
            assert answer.status_code == status
            assert says is None or says in answer.json()["error"]["message"]
    for wrong in ({"body": 0}, {"pixels": -1}):
        with pytest.raises(ValueError, match="limit of"):
            Limits(**wrong)


def test_no_error_tells_a_path_of_the_server(tmp_path):
    for told, text in {
        "no file tools.json": f"no file {tmp_path}/tools.json",
        "x is 'y.py', line 3": f"x is '{tmp_path}/a b/../y.py', line 3".replace("a b/../", ""),
        "see https://a.org/tmp/x": "see https://a.org/tmp/x",
        "no /v1/x in /messages": "no /v1/x in /messages",
    }.items():
        assert refusal_of(ValueError(text)).message == told
    with serving(store=tmp_path / "store") as served:
        body = {"model": "testbed", "messages": USER, "max_tokens": 1, "session_id": "one"}
        turn = served.post(CHAT, body).json()["kamera"]["turn_id"]
    for file in (tmp_path / "store").rglob("session.safetensors"):
        file.write_bytes(b"no session")
    with serving(store=tmp_path / "store") as served:
        for options in ({"kamera": {"after": turn}}, {"kamera": {"after": turn, "session_id": "one"}}):
            answer = served.post(CHAT, {"model": "testbed", "messages": USER, **options})
            assert answer.status_code == 404 and str(tmp_path) not in answer.text


def test_other_methods_paths_and_kinds_of_body_are_refused(served: Served):
    assert plain().get(served.url + CHAT).status_code == 405
    assert plain().get(served.url + "/v1/../../etc/passwd").status_code == 404
    assert plain().get(served.url + "/v1/responses/..%2f..%2fx").status_code == 404
    assert plain().get(served.url + "/v1/models/none/such").status_code == 404
    typed = plain().post(served.url + CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert typed.status_code == 415
    anthropics = plain().get(served.url + MESSAGES).json()
    assert anthropics["type"] == "error"


def test_half_a_request_and_a_half_closed_socket_hold_nothing(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "testbed", "messages": USER}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    for sent in (head, head + b"content-length: 99999\r\n\r\n{", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection((host, int(port))) as one:
            one.sendall(sent)
            one.shutdown(socket.SHUT_WR)
    with socket.create_connection((host, int(port))) as slow:  # reads nothing
        slow.sendall(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        assert served.post(CHAT, {"model": "testbed", "messages": USER, "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_a_full_queue_says_when_to_come_back():
    backbone().model.generation_config.eos_token_id, before = (
        None,
        backbone().model.generation_config.eos_token_id,
    )
    try:
        with serving(waiting=1, at_once=1) as served:
            body = {"model": "testbed", "messages": USER, "max_tokens": 150}
            found: list[httpx.Response] = []

            def ask() -> None:
                found.append(served.post(CHAT, body))

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert plain().get(served.url + "/health").json()["status"] == "ok"
    finally:
        backbone().model.generation_config.eos_token_id = before
    full = [one for one in found if one.status_code == 429]
    assert full and all(int(one.headers["retry-after"]) >= 1 for one in full)
    assert {one.status_code for one in found} == {200, 429}


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_others_are_answered_while_a_response_cannot_be_kept_yet(tmp_path, stream):
    with serving(store=tmp_path / "s") as served, ThreadPoolExecutor(1) as threads:
        other = sqlite3.connect(tmp_path / "s" / "responses.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        body = {"model": "testbed", "input": "x", "max_output_tokens": 1, "stream": stream}
        asked = threads.submit(served.post, RESPONSES, body)
        while not served.front.worker.done:
            assert not asked.done()
        for _ in range(20):
            assert plain().get(served.url + "/health", timeout=5).json()["status"] == "ok"
        assert not asked.done()
        other.execute("ROLLBACK")
        assert asked.result().status_code == 200


# -- keys ------------------------------------------------------------------------------------------


def test_metrics_under_a_key_are_those_of_its_tenant():
    with serving(keys={KEY: "one", OTHER: "two"}) as served:
        for _ in range(2):
            body = {"model": "testbed", "messages": USER, "max_tokens": 1}
            assert served.post(CHAT, body, headers={"x-api-key": KEY}).status_code == 200

        def counts(key: str) -> dict[str, str]:
            answer = plain().get(served.url + "/metrics", headers={"x-api-key": key})
            return dict(line.removeprefix("kamera_").split() for line in answer.text.splitlines())

        names = ("requests", "answered", "sessions", "anchors")
        assert [counts(KEY)[name] for name in names] == ["2", "2", "1", counts(KEY)["anchors"]]
        assert [counts(OTHER)[name] for name in names] == ["0"] * 4


def test_two_keys_share_nothing():
    with serving(keys={KEY: "one", OTHER: "two"}) as served:
        assert served.post(CHAT, {"model": "testbed", "messages": USER}).status_code == 401
        wrong = served.post(CHAT, {}, headers={"authorization": "Bearer nope"})
        assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
        assert plain().get(served.url + "/metrics").status_code == 401
        assert plain().get(served.url + "/health").status_code == 200
        asked = {"model": "testbed", "max_tokens": 3, "messages": [user("a long story of tag 4 and tag 5")]}
        cached = [
            served.openai(key).chat.completions.create(**asked).usage.prompt_tokens_details.cached_tokens
            for key in (KEY, KEY, OTHER, OTHER)
        ]
        assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0
        mine, theirs = served.openai(KEY), served.openai(OTHER)
        kept = mine.responses.create(model="testbed", input="secret", max_output_tokens=2)
        name = {"authorization": f"Bearer {OTHER}"}
        for method in ("GET", "DELETE"):
            assert (
                plain().request(method, f"{served.url}/v1/responses/{kept.id}", headers=name).status_code
                == 404
            )
        assert mine.responses.retrieve(kept.id).id == kept.id
        session = {"session_id": "shared"}
        for client in (mine, theirs):
            answer = client.chat.completions.create(**asked, extra_body=session)
            assert answer.model_extra["kamera"]["session_id"] == "shared"
        assert "x-api-key" not in served.anthropic(KEY).messages.create(**asked).model_dump_json()


@pytest.mark.parametrize("text", ["one", "one short", f"one {KEY}\ntwo {KEY}", "# nothing", f"a {KEY} b"])
def test_a_file_of_keys_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match="keys"):
        read_keys(tmp_path / "keys")
