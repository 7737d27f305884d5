"""Events for other viewers: a Chrome trace (Perfetto), and OpenTelemetry spans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kamera.window.events import Event
from kamera.window.view.story import Deed, lives

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_TIERS = ("live", "copies", "encodings", "store")


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """A trace in Chrome's format, for Perfetto and chrome://tracing, times in microseconds.

    One process with a slice an operation and slices of its parts inside, and counters of tokens run and of
    memory; one thread a life (`lives`).
    """
    told: list[dict[str, Any]] = [_named("process_name", 0, "Kamera")]
    for thread, life in enumerate(lives(events), start=1):
        told.append(_named("thread_name", thread, life.name))
        ran = prefix = whole = 0
        for deed in life.deeds:
            here = {"pid": 1, "tid": thread}
            start = 1e6 * (deed.time - deed.seconds)
            told.append(_slice(deed.name, start, deed.seconds, here, _facts(deed)))
            at = start
            for part, seconds in zip(("plan", "encode", "run", "show"), deed.times, strict=True):
                if seconds:
                    told.append(_slice(part, at, seconds, here, {}))
                at += 1e6 * seconds
            ran, prefix, whole = ran + deed.tokens, prefix + deed.prefix.tokens, whole + deed.whole.tokens
            counted = {"run": ran, "prefix cache": prefix, "everything": whole}
            for name, values in (
                ("tokens", counted),
                ("bytes", dict(zip(_TIERS, deed.memory, strict=True))),
            ):
                told.append(
                    {
                        "name": f"{name} {life.name}",
                        "ph": "C",
                        "ts": 1e6 * deed.time,
                        "pid": 1,
                        "args": values,
                    }
                )
    return {"traceEvents": told, "displayTimeUnit": "ms"}


def record_spans(events: Iterable[Event], provider: TracerProvider) -> int:
    """Tell a tracer provider of OpenTelemetry a span an operation, at its own time; returns their number.

    ``provider`` is that of an SDK (``pip install "kamera[telemetry]"``), with the exporter of your choice.
    ``gen_ai.usage.input_tokens`` are the window's tokens afterwards, of which
    ``gen_ai.usage.cache_read.input_tokens`` did not run for it.
    """
    tracer, count = provider.get_tracer("kamera"), 0
    for event in events:
        report = event.report
        tokens = event.anchor_tokens + sum(slot.length for slot in report.slots)
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": tokens,
            "gen_ai.usage.cache_read.input_tokens": max(0, tokens - report.tokens_recomputed),
            "kamera.window": event.window,
            "kamera.chunks": len(report.slots),
            "kamera.forwards": report.forwards,
            "kamera.tokens_recomputed": report.tokens_recomputed,
            "kamera.vision_encodes": report.vision_encodes,
            "kamera.guarantees": sorted({slot.guarantee for slot in report.slots}),
            "kamera.misses": sorted({outcome.reason for outcome in event.outcomes if outcome.reason}),
            "kamera.later.tokens": event.later.tokens,
        }
        if event.session:
            attributes["gen_ai.conversation.id"] = event.session
        end = round(1e9 * event.time)
        span = tracer.start_span(
            f"kamera {event.operation}", start_time=end - round(1e9 * report.seconds), attributes=attributes
        )
        span.end(end_time=end)
        count += 1
    return count


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, start: float, seconds: float, here: dict[str, int], facts: dict[str, Any]
) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": start, "dur": 1e6 * seconds, **here, "args": facts}


def _facts(deed: Deed) -> dict[str, Any]:
    return {
        "forwards": deed.forwards,
        "tokens": deed.tokens,
        "vision encodes": deed.encodes,
        "prefix cache tokens": deed.prefix.tokens,
        "everything tokens": deed.whole.tokens,
        "chunks": len(deed.order),
        "notes": list(deed.notes),
    }
