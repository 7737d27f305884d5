"""One event for each operation, to all who listen; none of them can break it."""

from __future__ import annotations

import json
import logging

import pytest

from kamera.errors import UnknownChunk
from kamera.window import Event
from tests.window.rig import QUESTION, make, rig


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
        assert event.anchor == window.anchor.digest
    assert [event.before for event in heard][1:] == [event.report.slots for event in heard][:-1]


def test_questions_and_refusals_are_no_events(pieces):
    backbone, (a, b, *_) = pieces
    window, heard = make(backbone, None, a, b), []
    window.on_event(heard.append)
    window.next_token_logits(QUESTION)
    window.plan_slide()
    with pytest.raises(UnknownChunk):
        window.recall("nothing")
    assert heard == []


def test_an_orbit_patch_is_an_event_without_a_plan(pieces):
    backbone, (a, b, *_) = pieces
    window, heard = make(backbone, None, a, b), []
    window.on_event(heard.append)
    window.form_orbit(1)
    (event,) = heard
    assert (event.operation, event.plan, event.report.forwards) == ("form_orbit", None, 1)


def test_a_listener_stops_and_forks_tell_it_too(pieces):
    backbone, (a, b, *_) = pieces
    window, heard = make(backbone), []
    end = window.on_event(lambda event: heard.append(event.operation))
    branch = window.fork()
    window.append(a)
    branch.append(b)
    end()
    window.append(b)
    branch.slide()
    assert heard == ["append", "append", "slide"]


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


def test_the_trace_is_one_listener_among_others(pieces, tmp_path):
    backbone, (a, b, *_) = pieces
    window, heard = make(backbone, trace=tmp_path / "trace.jsonl"), []
    window.on_event(heard.append)
    window.append(a)
    window.append(b)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [line["operation"] for line in lines] == [event.operation for event in heard]
    assert [line["chunks"] for line in lines] == [[a.id], [a.id, b.id]]
