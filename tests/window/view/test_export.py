"""Events for other viewers: Perfetto's format, and OpenTelemetry's spans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kamera.window import Times
from kamera.window.view.export import chrome_trace, record_spans
from tests.window.view.test_story import walk


def timed():
    times = Times(0.05, 0.0, 0.15, 0.02)
    return [replace(e, report=replace(e.report, times=times), time=1000.0 + i) for i, e in enumerate(walk())]


def test_a_chrome_trace_has_a_slice_an_operation_with_its_parts_inside():
    trace = json.loads(json.dumps(chrome_trace(timed())))["traceEvents"]
    whole = [e for e in trace if e["ph"] == "X" and "tokens" in e["args"]]
    assert [e["name"] for e in whole] == ["append", "append", "slide", "append", "recall"]
    assert (whole[1]["ts"], whole[1]["dur"]) == (pytest.approx(1e6 * 1000.75), pytest.approx(250_000))
    assert whole[2]["args"]["prefix cache tokens"] == 10 and whole[2]["args"]["tokens"] == 0
    parts = [e for e in trace if e["ph"] == "X" and "tokens" not in e["args"]]
    assert [e["name"] for e in parts[:3]] == ["plan", "run", "show"]
    for part, of in zip(parts, [e for e in whole for _ in range(3)], strict=True):
        assert of["ts"] <= part["ts"] and part["ts"] + part["dur"] <= of["ts"] + of["dur"] + 1e-3
    counters = [e["args"] for e in trace if e["ph"] == "C" and e["name"].startswith("tokens")]
    assert counters[-1] == {"run": 30, "prefix cache": 50, "everything": 115}


def test_a_span_tells_what_was_read_from_the_cache():
    pytest.importorskip("opentelemetry.sdk", reason="needs kamera[telemetry]")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    events = [replace(event, session="chat") for event in timed()]
    assert record_spans(events, provider) == 5
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [f"kamera {event.operation}" for event in events]
    told = [
        (
            span.attributes["gen_ai.usage.input_tokens"],
            span.attributes["gen_ai.usage.cache_read.input_tokens"],
        )
        for span in spans
    ]
    assert told == [(15, 5), (25, 15), (15, 15), (25, 15), (35, 35)]
    assert spans[0].attributes["kamera.misses"] == ("new",)
    assert {span.attributes["gen_ai.conversation.id"] for span in spans} == {"chat"}
    assert spans[1].end_time == 1001 * 10**9 and spans[1].end_time - spans[1].start_time == 250_000_000
