"""Tools: a model that was taught to call one is asked over every API, whole and as a stream."""

from __future__ import annotations

import json

import pytest
import torch

from kamera.engines.hf import HfEngine
from tests.content.templates import TOOLS
from tests.serve.rig import Served, serving, user
from tests.sessions.rig import speaking

SAID = 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'
ASK = [user("Read a.")]
CHAT = {"model": "tiny", "messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
FUNCTION = TOOLS[0]["function"]


def strict(kind: str) -> dict:
    """A strict tool whose argument is of a kind."""
    schema = {"type": "object", "properties": {"path": {"type": kind}}, "required": ["path"]}
    return {"type": "function", "function": {"name": "read", "parameters": schema, "strict": True}}


def described(**more) -> dict:
    """A tool as client libraries send one that says nothing."""
    function = {"name": "read", "description": "", "parameters": {"type": "object", "properties": {}, **more}}
    return {"type": "function", "function": function}


def taught() -> HfEngine:
    """A tiny model that answers with a call, whatever it is asked."""
    fresh = speaking.__wrapped__("thinking")
    model, tokenizer = fresh.model, fresh.processor
    (answer,) = tokenizer([SAID], return_tensors="pt")["input_ids"]
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []
    known = (TOOLS, [strict("string")], [strict("integer")], [described()], [described(required=[])])
    for tools in known:
        prompt = tokenizer.apply_chat_template(ASK, tools=tools, add_generation_prompt=True, tokenize=False)
        (before,) = tokenizer([prompt], return_tensors="pt")["input_ids"]
        asked.append((torch.cat([before, answer])[None], torch.cat([before * 0 - 100, answer])[None]))
    torch.manual_seed(0)
    teacher = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = torch.tensor(1.0)
    while loss > 0.1:
        loss = sum((model(input_ids=ids, labels=labels).loss for ids, labels in asked), start=torch.zeros(()))
        teacher.zero_grad()
        loss.backward()
        teacher.step()
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return HfEngine(model.eval(), tokenizer)


@pytest.fixture(scope="module")
def served():
    with serving(taught(), names=("tiny",)) as found:
        yield found


def test_a_call_is_told_apart_from_the_text_before_it(served: Served):
    answer = served.openai().chat.completions.create(**CHAT)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("read", {"path": "a"})
    again = served.openai().chat.completions.create(**CHAT)
    assert again.choices[0].message.tool_calls[0].id != call.id
    result = {"role": "tool", "tool_call_id": call.id, "content": "it is empty"}
    history = [*ASK, choice.message.model_dump(exclude_none=True), result]
    after = served.openai().chat.completions.create(**{**CHAT, "messages": history, "max_tokens": 2})
    report = after.model_extra["kamera"]
    assert report["session_id"] == answer.model_extra["kamera"]["session_id"]
    assert report["kept"] >= answer.usage.prompt_tokens - 20  # the prompt, and no second session


def test_a_stream_tells_no_part_of_a_call_as_text(served: Served):
    chunks = list(served.openai().chat.completions.create(stream=True, **CHAT))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert json.loads(calls[0].function.arguments) == {"path": "a"} and calls[0].index == 0
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_a_call_is_text(served: Served):
    for options in ({"tools": []}, {"tool_choice": "none"}):
        answer = served.openai().chat.completions.create(**{**CHAT, **options})
        assert not answer.choices[0].message.tool_calls and answer.choices[0].finish_reason in (
            "stop",
            "length",
        )


def test_anthropics_client_is_told_of_the_call(served: Served):
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    asked = {"model": "tiny", "max_tokens": 120, "messages": ASK, "tools": [tool]}
    client = served.anthropic()
    answer = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (answer, streamed):
        text, use = message.content
        assert (text.text, use.name, use.input) == ("I look.", "read", {"path": "a"})
        assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "no such file", "is_error": True}
    said = [block.model_dump(exclude_none=True) for block in streamed.content]
    history = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**asked, "messages": history, "max_tokens": 2})
    assert after.usage.cache_read_input_tokens > 40


def test_a_response_calls_and_goes_on_with_the_output(served: Served):
    client = served.openai()
    asked = {"model": "tiny", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 120}
    answer = client.responses.create(input="Read a.", **asked)
    message, call = answer.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
        "I look.",
        "read",
        {"path": "a"},
    )
    events = list(client.responses.create(input="Read a.", stream=True, **asked))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments) for e in done] == [{"path": "a"}]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "I look."
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "it is empty"}
    after = client.responses.create(input=[output], previous_response_id=answer.id, **asked)
    assert after.usage.input_tokens_details.cached_tokens > 40
    whole = [
        {"role": "user", "content": "Read a."},
        *(item.model_dump(exclude_none=True) for item in answer.output),
    ]
    replayed = client.responses.create(input=[*whole, output], **asked)
    assert (
        replayed.usage.input_tokens == after.usage.input_tokens and replayed.output_text == after.output_text
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "fits"), [("string", True), ("integer", False)])
def test_a_call_that_does_not_fit_a_strict_schema_stays_text(served: Served, kind, fits):
    tool = strict(kind)
    chunks = list(served.openai().chat.completions.create(**{**CHAT, "tools": [tool]}, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert bool(calls) == fits and ("<tool_call>" in text) != fits and text.startswith("I look.")
    assert chunks[-1].choices[0].finish_reason == ("tool_calls" if fits else "stop")
    for wrong in ({"type": "nonsense"}, {"$ref": "http://127.0.0.1:1/schema"}):
        tool["function"]["parameters"] = wrong
        answer = served.post("/v1/chat/completions", {**CHAT, "tools": [tool]})
        assert answer.status_code == 400 and "tools[0].function.parameters" in answer.text


def turns(count: int) -> list[dict]:
    history = [*ASK]
    for number in range(count):
        use = {"type": "tool_use", "id": f"t{number}", "name": "read", "input": {"path": str(number)}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"line {number}\n" * 12}
        history += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return history


def test_old_results_are_cleared_as_asked_and_said_so(served: Served):
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 200},
        "keep": {"type": "tool_uses", "value": 1},
    }
    asked = {"model": "tiny", "messages": turns(4), "tools": [tool]}

    def send(path: str = "/v1/messages", **changed) -> dict:
        body = {**asked, "context_management": {"edits": [{**edit, **changed}]}}
        body |= {} if path.endswith("count_tokens") else {"max_tokens": 2}
        return served.post(path, body).json()

    plain = served.post("/v1/messages", {**asked, "max_tokens": 2}).json()
    before = plain["usage"]["input_tokens"] + plain["usage"]["cache_read_input_tokens"]
    answer = send()
    (applied,) = answer["context_management"]["applied_edits"]
    after = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert applied["type"] == edit["type"] and applied["cleared_tool_uses"] == 3
    assert applied["cleared_input_tokens"] == before - after > 100
    assert send("/v1/messages/count_tokens") == {"input_tokens": after}
    for unmet in (
        {"trigger": {"type": "input_tokens", "value": before + 1}},
        {"clear_at_least": {"type": "input_tokens", "value": before}},
        {"exclude_tools": ["read"]},
    ):
        assert send(**unmet)["context_management"]["applied_edits"] == []
