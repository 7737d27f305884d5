"""A remote that does not answer costs a little time once, and is tried again later."""

from __future__ import annotations

from kamera.store.remote.guard import Breaker


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
