"""One event for each operation, to all who listen; none of them can break it."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from PIL import Image

from kamera import Chunk, ReusePolicy
from kamera.errors import UnknownChunk
from kamera.window import Event, Trace, former_of, keep_orbit, read_trace
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
        assert event.anchor == former_of(window).anchor.digest
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
    keep_orbit(window, 1)
    (event,) = heard
    assert (event.operation, event.plan, event.report.forwards) == ("keep_orbit", None, 1)


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
    assert list(read_trace(tmp_path / "trace.jsonl")) == [event.without_content() for event in heard]


def walk(window, pieces):
    """Events of every kind of operation: new, stored and patched chunks, leaving and coming back."""
    heard = []
    window.on_event(heard.append)
    a, b, c, _ = pieces[1]
    for chunk in (a, b, c):
        window.append(chunk)
    window.reorder([0, 2, 1])
    window.condition(1, False)
    window.condition(1, True)
    window.slide()
    window.flush()
    window.recall(a.id)
    keep_orbit(window, 1)
    window.evict(0)
    window.insert(0, b)
    return heard


@pytest.mark.parametrize("forms", ["returning", "always"])
def test_an_event_is_the_same_after_json(pieces, forms):
    heard = walk(make(pieces[0], policy=ReusePolicy(forms=forms)), pieces)
    for event in heard:
        again = Event.from_json(event.to_json())
        assert again == event
        assert "\n" not in event.to_json()
        assert again.plan is None
        bare = event.without_content()
        assert Event.from_json(bare.to_json()) == bare
    assert any(event.before and event.report.evicted for event in heard)


def test_what_ran_and_why_is_told_of_each_chunk(pieces):
    backbone, (a, b, c, _) = pieces
    window, heard = make(backbone, policy=ReusePolicy(on_leave="repair")), []
    window.on_event(heard.append)
    window.append(a)
    window.append(b)
    window.append(c)
    window.slide()
    window.flush()
    window.recall(a.id)
    told = [[(o.how, o.tokens, o.reason) for o in event.outcomes] for event in heard]
    n = {chunk.id: chunk.num_tokens for chunk in (a, b, c)}
    assert told[2] == [("kept", 0, ""), ("kept", 0, ""), ("prefilled", n[c.id], "new")]
    assert told[3] == [("prefilled", n[x.id], "no canonical") for x in (b, c)]
    assert told[4][-1] == ("prefilled", n[a.id], "no patch")
    for event in heard:
        assert sum(o.tokens for o in event.outcomes) == event.report.tokens_recomputed
        assert 0 < sum(event.report.times) <= event.report.seconds


def test_events_tell_the_account_and_the_memory(pieces):
    backbone, (a, b, *_) = pieces
    window, heard = make(backbone), []
    window.on_event(heard.append)
    window.append(a)
    window.append(b)
    window.flush()
    window.slide()
    assert heard[-1].usage.background == window.usage().background
    assert heard[-1].memory.live == window.memory().live > 0
    assert len({event.window for event in heard}) == 1


def test_a_picture_is_told_once_and_small(pieces, tmp_path):
    backbone, _ = pieces
    window, heard = make(backbone, trace=tmp_path / "bare"), []
    window.on_event(heard.append)
    window.on_event(Trace(tmp_path / "whole", content=True, session="s1"))
    picture = Image.new("RGB", (400, 100), "red")
    chunk = backbone.chunk_from_tensors(torch.arange(5), label="<script>")
    window.append(Chunk(chunk.input_ids, {}, chunk.fingerprint, "<script>", picture))
    window.condition(0, False)
    small = Image.open(io.BytesIO(heard[0].pictures[chunk.id]))
    assert max(small.size) == 88 and picture.size == (400, 100)
    assert heard[1].pictures == {}
    assert [(e.session, len(e.pictures)) for e in read_trace(tmp_path / "whole")] == [("s1", 1), ("s1", 0)]
    assert b"script" in (tmp_path / "whole").read_bytes()
    assert b"script" not in (tmp_path / "bare").read_bytes()


def test_nothing_is_made_for_nobody(pieces, monkeypatch):
    backbone, (a, *_) = pieces
    window = make(backbone)

    def fail(*_: object) -> None:
        raise AssertionError("an event was made")

    monkeypatch.setattr("kamera.window.contents.Event", fail)
    monkeypatch.setattr("kamera.window.contents.thumbnails", fail)
    window.append(a)
    assert len(window) == 1
