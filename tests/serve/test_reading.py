"""Whatever a body holds, reading it gives a request or a refusal that names a place."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.content import Fields, json_object
from kamera.errors import InvalidRequest
from kamera.serve.chat import Chat
from kamera.serve.messages import Messages
from kamera.serve.responses import Documents, Responses
from tests.content.templates import picture
from tests.serve.rig import png

PNG = png(picture(1))
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "kamera": {
            "minimum": "exact",
            "mode": "repair",
            "directives": [{"start": 1, "end": 2, "replacement": "x", "unit": "messages", "mode": "forget"}],
            "scratch": [{"role": "user", "content": "s"}],
        },
        "temperature": 0.5,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    },
    "messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": PNG}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"value": 1}}]},
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "metadata": {"user_id": "u"},
    },
    "responses": {
        "model": "m",
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "y"},
        ],
        "tools": [{"type": "function", **TOOL}],
        "tool_choice": "required",
        "text": {"format": {"type": "json_object"}},
        "metadata": {"a": "b"},
    },
}
BODIES["chat"]["messages"][1]["content"][1]["image_url"] = {"url": "data:image/png;base64," + PNG}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def read(api: str, body: dict[str, Any]) -> Any:
    """The request that a body is."""
    fields = Fields(body)
    if api == "responses":
        return Responses(fields, None, Documents(), "")
    return (Chat if api == "chat" else Messages)(fields)


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """Where something can be put in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for name, held in inner for place in places(held, (*at, name)))]


@pytest.mark.parametrize("api", BODIES)
def test_a_body_of_every_kind_of_part_is_read(api):
    asked = read(api, BODIES[api]).asked
    assert [m["role"] for m in asked.messages][-1] in ("tool", "user") and len(asked.messages) >= 3


@pytest.mark.few(1)
@pytest.mark.parametrize("api", BODIES)
@settings(max_examples=80)
@given(data=st.data())
def test_a_body_with_anything_anywhere_is_read_or_refused_by_place(api, data):
    body = copy.deepcopy(BODIES[api])
    *way, last = data.draw(st.sampled_from([place for place in places(body) if place]))
    holder: Any = body
    for name in way:
        holder = holder[name]
    if isinstance(holder, dict) and data.draw(st.booleans()):
        last = data.draw(st.text(min_size=1, max_size=5))  # a field that is not known
    holder[last] = data.draw(values)
    try:
        json_object(json.dumps(body).encode())
        read(api, body)
    except InvalidRequest as error:
        assert "\n" not in str(error) and len(str(error)) < 600


@pytest.mark.parametrize("api", BODIES)
def test_a_field_that_nobody_knows_is_refused_wherever_objects_are_read(api):
    checked = 0
    for place in places(BODIES[api]):
        body = copy.deepcopy(BODIES[api])
        holder: Any = body
        for name in place:
            holder = holder[name]
        free = {"metadata", "parameters", "input", "properties", "schema"}
        if isinstance(holder, dict) and (api == "messages" or not free & set(map(str, place[-1:]))):
            if place[-1:] in (("input",), ("schema",), ("input_schema",), ("properties",)):
                continue
            holder["nobody"] = 1
            with pytest.raises(InvalidRequest, match="nobody"):
                read(api, body)
            checked += 1
    assert checked > 5
