"""A remote that does not answer costs a little time once, and is tried again later."""

from __future__ import annotations

import pytest

from kamera.errors import RemoteUnavailable
from kamera.store.remote.guard import Breaker, Guard
from kamera.store.remote.redis import RedisBlobs
from tests.servers.redis_server import RedisServer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock) -> Breaker:
    return Breaker("reads", 10.0, 2, clock)


def test_the_breaker_opens_after_failures_and_retries_once() -> None:
    clock = Clock()
    one = breaker(clock)
    for outcome in (one.report_failure, one.report_success, one.report_failure):  # never two in a row
        assert one.allow()
        outcome()
    assert one.state == "closed" and one.allow()
    one.report_failure()
    assert one.state == "open" and not one.allow()
    clock.now = 9.9
    assert not one.allow()
    clock.now = 10.0
    assert one.state == "half-open"
    assert one.allow() and not one.allow()
    one.report_failure()
    assert one.state == "open" and not one.allow()
    clock.now = 20.0
    assert one.allow()
    one.report_success()
    assert one.state == "closed" and one.allow() and one.allow()


def test_a_server_that_hangs_is_asked_twice_and_then_left_alone(server: RedisServer) -> None:
    clock = Clock()
    url = f"unix://{server.socket}"
    blobs = RedisBlobs(url, "p/", timeout=0.5, retries=1, shown_url="shown://")
    guard = Guard(blobs, breaker(clock), breaker(clock))
    server.client().set("p/objects/a", b"blob")
    server.pause()
    for _ in range(20):
        with pytest.raises(RemoteUnavailable, match="shown://"):
            guard.get("objects/a")
    assert guard.reads.counts == {"calls": 2, "failures": 2, "skipped": 18}
    server.resume()
    blobs._client.connection_pool.disconnect()
    blobs._client.connection_pool.connection_kwargs["socket_timeout"] = 60  # one that lives is waited for
    clock.now = 10.0
    assert guard.get("objects/a") == b"blob"
    guard.close()
