"""A remote that does not answer costs a little time once, and is tried again later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from kamera.errors import RemoteUnavailable
from kamera.store.remote.blobs import BlobHead
from kamera.store.remote.guard import Breaker, Guard
from kamera.store.remote.redis import RedisBlobs
from lab.reliability.redis_server import RedisServer


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


def test_of_many_threads_one_makes_the_trial() -> None:
    clock = Clock()
    one = breaker(clock)
    one.report_failure()
    one.report_failure()
    clock.now = 10.0
    start, allowed = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        allowed.append(one.allow())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(allowed) == [False] * 7 + [True]


class Flaky:
    """Blobs of a service that can be switched off; counts what reaches it."""

    url = "flaky://"
    errors = (ConnectionError,)

    def __init__(self) -> None:
        self.up = True
        self.asked = 0
        self.interrupt = False

    def get(self, name: str) -> bytes | None:
        self.asked += 1
        if self.interrupt:
            raise KeyboardInterrupt
        if not self.up:
            raise ConnectionError("nobody there\nwith details")
        return b"blob"

    def put(self, name: str, data: bytes) -> None:
        self.get(name)

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        raise NotImplementedError

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        raise NotImplementedError

    def marks(self, folder: str) -> dict[str, str | None]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_an_outage_is_told_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, blobs = Clock(), Flaky()
    guard = Guard(blobs, breaker(clock), breaker(clock))
    with caplog.at_level(logging.WARNING):
        blobs.up = False
        for _ in range(50):
            with pytest.raises(RemoteUnavailable, match=r"flaky://.*nobody there") as caught:
                guard.get("a")
            assert "\n" not in str(caught.value)
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert blobs.asked == 2
        assert guard.reads.counts == {"calls": 2, "failures": 2, "skipped": 48}
        blobs.up = True
        clock.now = 10.0
        for _ in range(5):
            assert guard.get("a") == b"blob"
    assert len(caplog.records) == 2 and "again" in caplog.text


def test_a_remote_that_refuses_to_write_is_still_read() -> None:
    class Full(Flaky):
        def put(self, name: str, data: bytes) -> None:
            raise ConnectionError("no room")

    guard = Guard(Full(), breaker(Clock()), Breaker("writes", 10.0, 2, Clock()))
    for _ in range(5):
        with pytest.raises(RemoteUnavailable, match=r"writes|left alone"):
            guard.put("a", b"")
    assert guard.writes.state == "open"
    assert guard.get("a") == b"blob"


def test_an_interrupted_trial_does_not_keep_the_remote_shut() -> None:
    clock, blobs = Clock(), Flaky()
    guard = Guard(blobs, breaker(clock), breaker(clock))
    blobs.up = False
    for _ in range(2):
        with pytest.raises(RemoteUnavailable):
            guard.get("a")
    clock.now, blobs.up, blobs.interrupt = 10.0, True, True
    with pytest.raises(KeyboardInterrupt):
        guard.get("a")
    clock.now, blobs.interrupt = 20.0, False
    assert guard.get("a") == b"blob"


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
