"""OpenTelemetry GenAI traces as requests; what is missing is named."""

from __future__ import annotations

import base64
import json

import pytest

from kamera.errors import TraceError
from kamera.reuse import Media, Span
from lab.reuse.otel import TraceHole, read_calls
from lab.reuse.render import render
from lab.reuse.words import word_ids

PICTURE = base64.b64encode(b"red").decode()
DEEP = '{"arrayValue": {"values": [' * 300 + "{}" + "]}}" * 300
MESSAGES = [
    {"role": "user", "parts": [{"type": "text", "content": "What is on it?"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "call_1", "name": "look", "arguments": {"x": 1}}],
    },
    {
        "role": "tool",
        "parts": [
            {"type": "tool_call_response", "id": "call_1", "response": "a cat"},
            {"type": "blob", "modality": "image", "mime_type": "image/png", "content": PICTURE},
        ],
    },
]


def otlp(*spans: dict) -> dict:
    service = [{"key": "service.name", "value": {"stringValue": "agent"}}]
    return {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [{"spans": list(spans)}]}]}


def span(start: int = 1, name: str = "aa", **attributes: object) -> dict:
    held = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(MESSAGES)} | attributes
    pairs = [{"key": k, "value": {"stringValue": v}} for k, v in held.items() if v is not None]
    return {"traceId": "t1", "spanId": name, "startTimeUnixNano": str(start), "attributes": pairs}


def written(tmp_path, *documents: object, lines: bool = False):
    path = tmp_path / "trace.json"
    path.write_text("\n".join(json.dumps(d) for d in documents) if lines else json.dumps(documents[0]))
    return path


def test_calls_come_in_the_order_of_their_starts(tmp_path):
    late = span(20, "late", **{"gen_ai.conversation.id": "c"})
    tool = span(3, "tool", **{"gen_ai.operation.name": "execute_tool", "gen_ai.input.messages": None})
    read = read_calls(written(tmp_path, otlp(late, tool), otlp(span(10, "early")), lines=True))
    assert [(c.span, c.service, c.session) for c in read.calls] == [
        ("early", "agent", "t1"),
        ("late", "agent", "c"),
    ]


def test_structured_flat_and_row_traces_say_the_same(tmp_path):
    (expected,) = read_calls(written(tmp_path, otlp(span()))).calls
    plain = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": MESSAGES, "service.name": "agent"}
    flat = {
        "context": {"trace_id": "t1", "span_id": "aa"},
        "start_time": "2026-11-22T10:00:00Z",
        "attributes": plain,
    }
    row = {"trace_id": "t1", "spans": [{"trace_id": "t1", "span_id": "aa", "attributes": plain}]}
    column = {"trace_id": "t1", "span_id": "aa", "attributes": json.dumps(plain)}
    in_event = {
        "traceId": "t1",
        "spanId": "aa",
        "attributes": {"gen_ai.operation.name": "chat", "service.name": "agent"},
    }
    in_event["events"] = [{"attributes": {"gen_ai.input.messages": MESSAGES}}]
    value = {"arrayValue": {"values": [_any(m) for m in MESSAGES]}}
    structured = span(**{"gen_ai.input.messages": None})
    structured["attributes"].append({"key": "gen_ai.input.messages", "value": value})
    for document in (flat, row, [flat], column, in_event, otlp(structured)):
        (call,) = read_calls(written(tmp_path, document)).calls
        assert call == expected


def _any(value: object) -> dict:
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": k, "value": _any(v)} for k, v in value.items()]}}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_any(v) for v in value]}}
    return {"intValue": value} if isinstance(value, int) else {"stringValue": value}


def test_a_call_is_rendered_with_its_places(tmp_path):
    extra = {
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
        "gen_ai.tool.definitions": json.dumps([{"name": "look"}]),
    }
    (call,) = read_calls(written(tmp_path, otlp(span(**extra)))).calls
    assert [m.role for m in call.messages] == ["system", "user", "assistant", "tool"]
    prompt = render(call, word_ids, media_tokens=7)
    (picture,) = prompt.media
    assert isinstance(picture, Media)
    assert picture.stop - picture.start == 7
    assert len(prompt.anchors) == 5
    first = len(word_ids("<|tools|>\n"))
    assert prompt.spans == (Span(first, first + len(word_ids('{\n "name": "look"\n}\n')), "tool"),)
    assert word_ids("cat")[0] in prompt.ids
    assert word_ids("call_1")[0] not in prompt.ids  # templates do not show it


def test_equal_pictures_have_one_digest_and_others_another(tmp_path):
    def digest(content: str) -> str:
        parts = [{"type": "blob", "mime_type": "image/png", "content": content}]
        messages = json.dumps([{"role": "user", "parts": parts}])
        (call,) = read_calls(written(tmp_path, otlp(span(**{"gen_ai.input.messages": messages})))).calls
        return call.messages[0].parts[0].digest

    assert digest(PICTURE) == digest(PICTURE) != digest(base64.b64encode(b"blue").decode())


def with_part(**part: object) -> str:
    return json.dumps([{"role": "user", "parts": [part]}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (None, "not captured"),
        (json.dumps(MESSAGES)[:-30], "cut off"),
        ('{"role": "user"}', "not a list"),
        ('["hello"]', "no role"),
        ('[{"role": "user", "content": "hello"}]', "no parts"),
        ('[{"role": "user", "parts": ["hello"]}]', "no type"),
        (with_part(type="uri", modality="image", uri="https://x/y.png"), "by reference only"),
        (with_part(type="file", modality="image", file_id="f1"), "by reference only"),
        (with_part(type="blob", content=""), "without bytes"),
        (with_part(type="blob", content="!!!!"), "base64"),
        (with_part(type="text"), "without content"),
        (with_part(type="tool_call_response", id="1"), "without content"),
    ],
)
def test_a_hole_is_named_or_left_out_when_asked(tmp_path, messages, named):
    whole, torn = span(1, "whole"), span(2, "torn", **{"gen_ai.input.messages": messages})
    path = written(tmp_path, otlp(whole, torn))
    with pytest.raises(TraceHole, match=f"span torn: .*{named}"):
        read_calls(path)
    read = read_calls(path, skip_holes=True)
    assert [c.span for c in read.calls] == ["whole"]
    assert len(read.holes) == 1
    assert named in read.holes[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[1, 2]",
        '{"resourceSpans": 3}',
        '{"resourceSpans": [{"scopeSpans": [{"spans": [7]}]}]}',
        '{"attributes": 3}',
        '{"attributes": [{"value": {}}]}',
        '{"attributes": {"gen_ai.operation.name": "chat", "gen_ai.input.messages": []}, "start_time": "x"}',
        '{"attributes": {"gen_ai.operation.name": "chat", "gen_ai.input.messages": []}, "start_time": [1]}',
        '{"name": "a span", "attributes": {"http.method": "GET"}}',
        "[" * 100_000,
        '{"attributes": [{"key": "k", "value": ' + DEEP + "}]}",
    ],
)
def test_what_is_no_trace_is_a_trace_error(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read_calls(path)
    assert not isinstance(refused.value, TraceHole)
    assert str(path) in str(refused.value)
