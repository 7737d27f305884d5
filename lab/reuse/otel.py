"""Requests of agents from OpenTelemetry traces: spans with attributes of the GenAI conventions, as JSON.

The reader accepts OTLP/JSON documents (``resourceSpans``), flat spans with an ``attributes`` object (the
output of SDKs), and rows with a list of ``spans``; one document, a list of them, or one per line. A span is a
request if its ``gen_ai.operation.name`` is a model's call. ``gen_ai.input.messages`` of the span or of one of
its events holds the messages, structured or as a JSON string.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kamera.errors import TraceError
from kamera.ops import digest

CALLS = ("chat", "text_completion", "generate_content")
"""Values of ``gen_ai.operation.name`` for calls of a model."""

_SYSTEM = "gen_ai.system_instructions"
_TOOLS = "gen_ai.tool.definitions"
_MESSAGES = "gen_ai.input.messages"


class TraceHole(TraceError):
    """A trace of requests lacks part of a request's content."""


@dataclass(frozen=True)
class Part:
    """A piece of a message: ``text``, or media with a ``digest`` of its bytes."""

    text: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Message:
    """A message of one role."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Call:
    """One request of a trace, with the ``service`` and the ``session`` that sent it."""

    span: str
    service: str
    session: str
    tools: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Calls:
    """The requests of a trace in the order of their starts, and one line for each hole."""

    calls: tuple[Call, ...]
    holes: tuple[str, ...] = ()


def read_calls(path: str | Path, *, skip_holes: bool = False) -> Calls:
    """The requests that the trace at ``path`` recorded.

    Raises `TraceError` for a file that is not a trace or holds no request, and `TraceHole` for a request with
    an incomplete prompt: no messages (content was not captured), truncated messages, media by reference
    only. With ``skip_holes`` such requests are left out and listed in `Calls.holes`.
    """
    found: list[tuple[int, int, Call]] = []
    holes: list[str] = []
    for number, (service, span) in enumerate(_spans(Path(path))):
        attributes = _attributes(span, path)
        operation = attributes.get("gen_ai.operation.name", "chat" if _MESSAGES in attributes else None)
        if operation not in CALLS:
            continue
        name = str(span.get("spanId") or span.get("span_id") or _context(span).get("span_id") or number)
        try:
            call = _call(name, service or str(attributes.get("service.name", "")), span, attributes)
        except _Hole as hole:
            message = f"{path}: span {name}: {hole}"
            if not skip_holes:
                raise TraceHole(f"{message}: record it again, or leave such requests out") from None
            holes.append(message)
            continue
        found.append((_start(span, path), number, call))
    if not found and not holes:
        raise TraceError(f"{path}: no span of a model's call (gen_ai.operation.name: {', '.join(CALLS)})")
    return Calls(tuple(call for *_, call in sorted(found, key=lambda row: row[:2])), tuple(holes))


class _Hole(Exception):
    """A prompt is incomplete."""


def _call(name: str, service: str, span: Mapping[str, Any], attributes: Mapping[str, Any]) -> Call:
    if _MESSAGES not in attributes:
        raise _Hole(f"no {_MESSAGES}: its content was not captured")
    messages = [_message(m) for m in _listed(attributes, _MESSAGES)]
    if attributes.get(_SYSTEM) is not None:
        parts = tuple(_part(p) for p in _listed(attributes, _SYSTEM))
        messages.insert(0, Message("system", parts))
    tools: tuple[str, ...] = ()
    if attributes.get(_TOOLS) is not None:
        tools = tuple(_plain(tool) for tool in _listed(attributes, _TOOLS))
    trace = span.get("traceId") or span.get("trace_id") or _context(span).get("trace_id") or ""
    session = str(attributes.get("gen_ai.conversation.id", trace))
    return Call(name, service, session, tools, tuple(messages))


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _Hole(f"a message has no role: {_short(message)}")
    parts = message.get("parts")
    if not isinstance(parts, list):
        raise _Hole(f"a message of the {message['role']} has no parts")
    return Message(message["role"], tuple(_part(p) for p in parts))


def _part(part: Any) -> Part:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise _Hole(f"a part has no type: {_short(part)}")
    kind = part["type"]
    if kind in ("uri", "file"):
        raise _Hole(f"media by reference only ({kind}): its bytes are not in the trace")
    if kind == "blob":
        content = part.get("content")
        if not isinstance(content, str) or not content:
            raise _Hole("media without bytes")
        try:
            data = base64.b64decode(content, validate=True)
        except ValueError:
            raise _Hole("media whose base64 is damaged") from None
        return Part(digest=digest("kamera.reuse.media.v1", str(part.get("mime_type", "")), data))
    if kind in ("text", "reasoning"):
        if not isinstance(part.get("content"), str):
            raise _Hole(f"a part of type {kind} without content")
        return Part(text=part["content"])
    if kind == "tool_call_response":
        answer = part.get("response", part.get("result"))
        if answer is None:
            raise _Hole("a tool's response without content")
        return Part(text=_plain(answer))
    unsaid = ("type", "id")  # a call's id links spans; templates do not show it
    return Part(text=_plain({name: part[name] for name in part if name not in unsaid}))


def _spans(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for document in _documents(path):
        if not isinstance(document, Mapping):
            raise TraceError(f"{path}: {_short(document)} is not a span: give OTLP/JSON or JSON spans")
        if "resourceSpans" in document:
            yield from _otlp(document, path)
        elif isinstance(document.get("spans"), list):
            for span in document["spans"]:
                yield "", _object(span, path)
        else:
            yield "", document


def _otlp(document: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for resource in _objects(document, "resourceSpans", path):
        facts = _attributes(_object(resource.get("resource", {}), path), path)
        for scope in _objects(resource, "scopeSpans", path):
            for span in _objects(scope, "spans", path):
                yield str(facts.get("service.name", "")), span


def _documents(path: Path) -> Iterator[Any]:
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    try:
        whole = json.loads(text)
    except RecursionError:
        raise TraceError(f"{path}: JSON nested too deep") from None
    except ValueError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise TraceError(f"{path}:{number}: no JSON ({error}): give OTLP/JSON traces") from None
    else:
        yield from whole if isinstance(whole, list) else [whole]


def _attributes(span: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Attributes of the span and of its events, in which some instrumentations record the messages."""
    held = span.get("attributes") or {}
    if isinstance(held, str):  # a column of a table
        try:
            held = json.loads(held)
        except ValueError:
            held = None
    if isinstance(held, list):
        try:
            held = {pair["key"]: _value(pair.get("value", {})) for pair in held}
        except (TypeError, KeyError, AttributeError, RecursionError):
            held = None
    if not isinstance(held, Mapping):
        raise TraceError(f"{path}: a span's attributes are neither an object nor a list of key and value")
    merged = dict(held)
    events = span.get("events")
    for event in events if isinstance(events, list) else []:
        if isinstance(event, Mapping) and event.get("attributes"):
            for name, value in _attributes({"attributes": event["attributes"]}, path).items():
                if name.startswith("gen_ai."):
                    merged.setdefault(name, value)
    return merged


def _value(value: Mapping[str, Any]) -> Any:
    """An OTLP AnyValue as plain JSON."""
    if "arrayValue" in value:
        return [_value(v) for v in value["arrayValue"].get("values", [])]
    if "kvlistValue" in value:
        return {pair["key"]: _value(pair["value"]) for pair in value["kvlistValue"].get("values", [])}
    return next(iter(value.values()), None)


def _listed(attributes: Mapping[str, Any], name: str) -> list[Any]:
    value = attributes[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _Hole(f"{name} is not JSON: was it cut off?") from None
    if not isinstance(value, list):
        raise _Hole(f"{name} is not a list")
    return value


def _start(span: Mapping[str, Any], path: str | Path) -> int:
    """Start of the span in the file's own unit; 0 without one, which keeps the order of the file."""
    value = span.get("startTimeUnixNano", span.get("start_time_unix_nano", span.get("start_time", 0)))
    if isinstance(value, str) and not value.isdigit():
        from datetime import datetime

        try:
            return int(datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp() * 10**9)
        except ValueError:
            raise TraceError(f"{path}: a span starts at {value[:40]!r}, which is not a time") from None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TraceError(f"{path}: a span starts at {_short(value)}, which is not a time") from None


def _context(span: Mapping[str, Any]) -> Mapping[str, Any]:
    context = span.get("context")
    return context if isinstance(context, Mapping) else {}


def _objects(holder: Mapping[str, Any], name: str, path: Path) -> list[Mapping[str, Any]]:
    held = holder.get(name, [])
    if not isinstance(held, list):
        raise TraceError(f"{path}: {name} is not a list: give OTLP/JSON traces")
    return [_object(one, path) for one in held]


def _object(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TraceError(f"{path}: {_short(value)} is not a span: give OTLP/JSON traces")
    return value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
