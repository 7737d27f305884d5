"""One event for each operation, to all who listen; none of them can break it."""

from __future__ import annotations

import logging

import pytest

from kamera.window import Event, former_of
from tests.window.rig import make, rig


@pytest.fixture(scope="module")
def pieces():
    return rig("qwen2_5_vl")


def test_each_operation_is_one_event_with_plan_and_report(pieces):
    backbone, (a, b, c, _) = pieces
    window, heard = make(backbone), []
    window.on_event(heard.append)
    reports = [window.append(a), window.append(b), window.append(c), window.reorder([0, 2, 1])]
    reports += [window.condition(1, False), window.slide(), window.recall(a.id), window.evict(0)]
    assert [event.report for event in heard] == reports
    assert all(isinstance(event, Event) for event in heard)
    for event in heard:
        assert event.operation == event.plan.operation == event.report.operation
        assert event.plan.cost.forwards == event.report.forwards
        assert event.plan.after.chunk_ids == tuple(s.chunk_id for s in event.report.slots)
        assert event.anchor == former_of(window).anchor.digest
    assert [event.before for event in heard][1:] == [event.report.slots for event in heard][:-1]


def test_a_listener_that_fails_costs_a_warning(pieces, caplog):
    backbone, (a, *_) = pieces
    window, heard = make(backbone), []

    def fail(event: Event) -> None:
        raise RuntimeError("no ears, says the test")

    window.on_event(fail)
    window.on_event(heard.append)
    with caplog.at_level(logging.WARNING, logger="kamera.window.events"):
        window.append(a)
    assert len(window) == len(heard) == 1
    assert "no ears" in caplog.text
