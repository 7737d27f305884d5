"""Bodies that are small enough alone are bounded together, and are let go when their requests end."""

from __future__ import annotations

import socket
import time

import pytest

from kamera.serve import Limits
from tests.serve.rig import Served, plain, serving, user

CHAT, KIND = "/v1/chat/completions", {"content-type": "application/json"}
PARTS = (300_000, 400_000)


def _bytes(served: Served) -> int:
    """Bytes of bodies that the server counts."""
    lines = dict(line.split() for line in plain().get(served.url + "/metrics").text.splitlines())
    return int(lines["kamera_body_bytes"])


def _until(served: Served, count: int) -> None:
    """Wait until it counts so many."""
    end = time.monotonic() + 30
    while _bytes(served) != count:
        assert time.monotonic() < end, f"{_bytes(served)} bytes instead of {count}"
        time.sleep(0.01)


@pytest.fixture
def served():
    with serving(limits=Limits(bodies=1 << 20)) as server:
        yield server


def test_bodies_of_many_connections_are_bounded_together(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    slow = [socket.create_connection((host, int(port))) for _ in PARTS]
    for one, size in zip(slow, PARTS, strict=True):  # each says that more comes
        one.sendall(f"{head}content-length: {size + 1}\r\n\r\n".encode() + b" " * size)
    _until(served, sum(PARTS))

    many = plain().post(served.url + CHAT, content=b" " * 400_000, headers=KIND)
    assert many.status_code == 503 and int(many.headers["retry-after"]) > 0
    assert "1048576 bytes of requests" in many.json()["error"]["message"]
    few = served.post(CHAT, {"model": "testbed", "messages": [user("x")], "max_tokens": 1})
    assert few.status_code == 200
    assert _bytes(served) == sum(PARTS)

    slow[1].sendall(b" ")  # whole, and no JSON
    assert b" 400 " in slow[1].recv(64)
    _until(served, PARTS[0])
    slow[0].close()  # gone
    _until(served, 0)
    assert plain().post(served.url + CHAT, content=b" " * 400_000, headers=KIND).status_code == 400
    slow[1].close()


def test_the_body_of_a_stream_counts_until_its_end(served: Served):
    body = {"model": "testbed", "messages": [user("x" * 50)], "max_tokens": 4, "stream": True}
    assert "data:" in served.post(CHAT, body).text
    _until(served, 0)
