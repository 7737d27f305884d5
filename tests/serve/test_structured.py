"""Clients that ask for JSON of a schema, or force a call: each is given what it parses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from kamera.engines import EngineCompletion, EnginePrompt
from kamera.serve import Service, Within
from kamera.trust import ReusePolicy
from tests.serve.rig import KEY, Served, plain, serving, user
from tests.serve.test_frameworks import agent, chain
from tests.serve.test_tools import FUNCTION, taught
from tests.sessions.rig import speaking

ASK = [user("What is the weather?")]


class Weather(BaseModel):
    """What is wanted, without a text that has no end."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy"]
    wind: Literal[0, 1, 2]
    rain: bool


SCHEMA = Weather.model_json_schema()
REPORT = {
    "type": "function",
    "function": {"name": "report", "description": "It is so.", "parameters": SCHEMA},
}
REST = {"type": "function", "function": {"name": "rest", "description": "Do nothing."}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "Weather", "schema": SCHEMA, "strict": True}}
ASKED: dict[str, Any] = {"model": "any", "messages": ASK, "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def served():
    """A model that says anything."""
    with serving(speaking("thinking"), names=("any",)) as found:
        yield found


@pytest.fixture(scope="module")
def calling():
    with serving(taught(), names=("tiny",)) as found:
        yield found


# -- openai ----------------------------------------------------------------------------------------


def test_openais_chat_is_told_json_of_its_schema_whole_and_as_a_stream(served: Served):
    client = served.openai()
    answer = client.chat.completions.parse(**ASKED, response_format=Weather)
    choice = answer.choices[0]
    assert isinstance(choice.message.parsed, Weather) and choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    with client.chat.completions.stream(**ASKED, response_format=Weather) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert "".join(pieces) == final.content == choice.message.content and len(pieces) > 5
    drawn = {
        client.chat.completions.parse(**{**ASKED, "temperature": 2}, seed=n, response_format=Weather)
        .choices[0]
        .message.content
        for n in range(4)
    }
    assert len(drawn) > 1  # the model says what it will, within the schema


def test_openais_chat_is_told_any_object(served: Served):
    """A text of the object has no end with this model: what it has said is the beginning of one."""
    answer = served.openai().chat.completions.create(
        **{**ASKED, "max_tokens": 12}, response_format={"type": "json_object"}
    )
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.few(1)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "report"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_openais_chat_forces_a_call(served: Served, choice, stream):
    asked = {**ASKED, "tools": [REPORT, REST], "tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        chunks = list(served.openai().chat.completions.create(**asked, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert not "".join(delta.content or "" for delta in deltas)
        calls, reason = [c for d in deltas for c in d.tool_calls or []], chunks[-1].choices[0].finish_reason
    else:
        (whole,) = served.openai().chat.completions.create(**asked).choices
        assert not whole.message.content
        calls, reason = whole.message.tool_calls, whole.finish_reason
    (call,) = calls
    assert reason == "tool_calls" and call.function.name in ("report", "rest")
    if call.function.name == "report":
        Weather.model_validate_json(call.function.arguments)
    assert choice == "required" or call.function.name == "report"


def test_a_call_that_is_forced_is_gone_on_from(served: Served):
    client, asked = served.openai(), {**ASKED, "tools": [REPORT], "tool_choice": "required"}
    first = client.chat.completions.create(**asked, parallel_tool_calls=False)
    said = first.choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "noted"}
    history = [*ASK, said.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**{**asked, "messages": history})
    assert after.choices[0].message.tool_calls
    assert after.model_extra["kamera"]["session_id"] == first.model_extra["kamera"]["session_id"]
    assert after.model_extra["kamera"]["kept"] >= first.usage.prompt_tokens - 20


def test_openais_responses_are_of_a_schema_and_force_calls(served: Served):
    client = served.openai()
    asked = {"model": "any", "input": "What is the weather?", "temperature": 0, "max_output_tokens": 200}
    answer = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    assert answer.text.format.name == "Weather"
    with client.responses.stream(**asked, text_format=Weather) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == answer.output_text
    tools = [{"type": "function", **tool["function"]} for tool in (REPORT, REST)]
    choice = {"type": "function", "name": "report"}
    forced = client.responses.create(**asked, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert forced.tool_choice.name == "report" and forced.parallel_tool_calls is False
    (call,) = [item for item in forced.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_what_cannot_be_bound_is_a_400_that_says_where(served: Served, api):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    where = {
        "chat": ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
        "responses": ("text", {"format": {"type": "json_schema", "name": "n", "schema": schema}}),
        "messages": ("output_config", {"format": {"type": "json_schema", "schema": schema}}),
    }
    name, value = where[api]
    asked = {"input": "x"} if api == "responses" else {"messages": ASK, "max_tokens": 5}
    path = "/v1/chat/completions" if api == "chat" else f"/v1/{api}"
    for streams in (False, True):
        answer = served.post(path, {"model": "any", **asked, name: value, "stream": streams})
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert f"{name}." in message and "cannot be bound at $.properties.a: " in message
        assert "uniqueItems" in message
    malformed = json.loads(json.dumps(value).replace('"array"', '"lot"'))
    answer = served.post(path, {"model": "any", **asked, name: malformed})
    assert (
        answer.status_code == 400 and "is no JSON schema" in answer.text and "$.properties.a" in answer.text
    )


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [REPORT]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [REPORT]}, "tool_choice"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "no"}}, "tools": [REPORT]},
            "tool_choice.function",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "json_schema.schema"),
    ],
)
def test_a_choice_or_a_format_that_is_not_one_is_refused(served: Served, options, place):
    answer = served.post("/v1/chat/completions", {**ASKED, **options})
    assert answer.status_code == 400 and place in answer.json()["error"]["param"]


# -- anthropic -------------------------------------------------------------------------------------


def test_anthropics_client_forces_calls_and_is_told_json(served: Served):
    client = served.anthropic()
    asked: dict[str, Any] = {"model": "any", "max_tokens": 200, "messages": ASK}
    tools = [
        {
            "name": t["function"]["name"],
            "input_schema": t["function"].get("parameters", {"type": "object", "properties": {}}),
        }
        for t in (REPORT, REST)
    ]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "report"}):
        answer = client.messages.create(**asked, tools=tools, tool_choice=choice)
        (use,) = answer.content
        assert answer.stop_reason == "tool_use" and use.name in ("report", "rest")
        if use.name == "report":
            Weather.model_validate(use.input)
    with client.messages.stream(**asked, tools=tools, tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == use.input
    answer = client.messages.parse(**asked, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)
    with pytest.raises(anthropic.BadRequestError, match="names 'no', which is no tool"):
        client.messages.create(**asked, tools=tools, tool_choice={"type": "tool", "name": "no"})


# -- langchain, openai-agents, smolagents, pydantic-ai -----------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_is_told_what_it_asked_for(served: Served, method):
    model = chain(served, model="any", max_tokens=200)
    bound = model.with_structured_output(Weather, method=method)
    assert isinstance(bound.invoke(ASK), Weather)
    streamed = [*bound.stream(ASK)]
    assert isinstance(streamed[-1], Weather)


@pytest.mark.few(1)
@pytest.mark.parametrize("over", ["responses", "chat"])
def test_an_agent_of_openai_has_its_output_type(served: Served, over):
    made, runner = agent(served, over, name="any", instructions=None, max_tokens=200, output_type=Weather)
    assert isinstance(asyncio.run(runner.run(made, "What is the weather?")).final_output, Weather)


def test_the_agent_of_smolagents_calls_its_tools(served: Served):
    smolagents = pytest.importorskip("smolagents")

    class Report(smolagents.Tool):
        name, description, output_type = "report", "Say it.", "string"
        inputs = {"rain": {"type": "boolean", "description": "whether it rains"}}  # noqa: RUF012

        def forward(self, rain: bool) -> str:
            asked.append(rain)
            return "noted"

    asked: list[bool] = []
    model = smolagents.OpenAIServerModel(
        model_id="any", api_base=f"{served.url}/v1", api_key=KEY, temperature=0, max_tokens=300,
        client_kwargs={"max_retries": 0, "http_client": plain()},
    )  # fmt: skip
    message = model.generate(
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}], tools_to_call_from=[Report()]
    )
    assert message.tool_calls
    for call in message.tool_calls:  # its own choice is "required"
        Report()(**json.loads(call.function.arguments))
    assert asked and all(isinstance(rain, bool) for rain in asked)


@pytest.mark.few(1)
@pytest.mark.parametrize("output", ["tool", "native"])
def test_pydantic_ai_has_its_output_type(served: Served, output):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> Any:
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key=KEY,
            max_retries=0,
            http_client=httpx.AsyncClient(verify=False),
        )
        model = OpenAIChatModel("any", provider=OpenAIProvider(openai_client=client))
        wanted = Weather if output == "tool" else pydantic_ai.NativeOutput(Weather)
        made = pydantic_ai.Agent(
            model, output_type=wanted, model_settings={"temperature": 0, "max_tokens": 200}
        )
        return (await made.run("What is the weather?")).output

    assert isinstance(asyncio.run(run()), Weather)


# -- calls that are not forced ---------------------------------------------------------------------


@pytest.mark.slow
def test_one_call_is_enough_where_calls_may_not_be_parallel(calling: Served):
    asked = {
        "model": "tiny",
        "messages": [user("Read a.")],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    answer = calling.openai().chat.completions.create(
        **asked, temperature=0, max_tokens=120, parallel_tool_calls=False
    )
    choice = answer.choices[0]
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "a"}


# -- over another engine ---------------------------------------------------------------------------


class Recording:
    """An engine that answers every prompt with two tokens, and keeps it."""

    def __init__(self) -> None:
        self.prompts: list[EnginePrompt] = []

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        self.prompts.append(prompt)
        yield EngineCompletion("", (5, 6), len(prompt.ids), 0)


def test_over_an_engine_the_request_is_its_own(tmp_path):
    engine = Recording()
    service = Service(speaking("thinking"), ReusePolicy.exact(), store=tmp_path, engine=engine)
    within = Within(service)
    within.complete({**ASKED, "response_format": FORMAT})
    assert engine.prompts[0].sampling.options()["structured_outputs"] == {"json": SCHEMA}
    within.complete({**ASKED, "tools": [REPORT, REST], "tool_choice": "required"})
    wanted = json.loads(
        next(p for p in engine.prompts[1:] if p.tools).sampling.options()["structured_outputs"][
            "structural_tag"
        ]
    )
    tags = wanted["format"]["elements"][0]["tags"]
    assert [tag["begin"] for tag in tags] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("report", "rest")
    ]
    assert tags[0]["content"]["json_schema"]["properties"] == SCHEMA["properties"]
    service.close()
