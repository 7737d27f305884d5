"""Agents' own client libraries change their URL: whole and streamed, tools, pictures, cancels, errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from examples import in_process
from tests.serve.rig import KEY, SYSTEM, Served, as_chat, frames, plain, png, said, serving, user
from tests.serve.test_tools import FUNCTION, taught

ASK = "What is the value of tag 3?"
LONG = "value of tag 3?"  # the backbone does not come to an end


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def calling():
    with serving(taught(), names=("tiny",)) as found:
        yield found


def settled(served: Served) -> None:
    """The worker is free again, and the server answers."""
    answer = served.post(
        "/v1/chat/completions", {"model": "testbed", "max_tokens": 1, "messages": [user("x")]}
    )
    assert answer.status_code == 200


# -- langchain-openai ------------------------------------------------------------------------------


def chain(served: Served, **options: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    given = {"model": "testbed", "max_tokens": 6, "temperature": 0, "max_retries": 0, **options}
    return langchain.ChatOpenAI(base_url=f"{served.url}/v1", api_key=KEY, http_client=plain(), **given)


def test_langchain_is_told_the_same_whole_and_as_a_stream_with_pictures(served: Served):
    messages = [SYSTEM, user(ASK, frames()[0])]
    sent = [*map(as_chat, messages)]
    whole = chain(served).invoke(sent)
    assert whole.content == said(messages) and whole.usage_metadata["output_tokens"] > 0
    cached = chain(served).invoke(sent).usage_metadata["input_token_details"]["cache_read"]
    assert cached > whole.usage_metadata["input_tokens"] // 2
    pieces = list(chain(served, stream_usage=True).stream([user(LONG)]))
    assert "".join(p.content for p in pieces) == said([user(LONG)])
    assert chain(served).bind(logprobs=True).invoke(sent).response_metadata["logprobs"]["content"]


def test_langchain_calls_a_tool_and_goes_on_with_its_result(calling: Served):
    model = chain(calling, model="tiny", max_tokens=120).bind_tools(
        [{"type": "function", "function": FUNCTION}]
    )
    answer = model.invoke([user("Read a.")])
    (call,) = answer.tool_calls
    assert (answer.content, call["name"], call["args"]) == ("I look.", "read", {"path": "a"})
    from langchain_core.messages import HumanMessage, ToolMessage

    history = [HumanMessage("Read a."), answer, ToolMessage("it is empty", tool_call_id=call["id"])]
    after = model.bind(max_tokens=2).invoke(history)
    assert after.usage_metadata["input_token_details"]["cache_read"] > 40
    streamed = list(model.stream([user("Read a.")]))
    (chunks,) = [p.tool_call_chunks for p in streamed if p.tool_call_chunks]
    assert json.loads(chunks[0]["args"]) == {"path": "a"}


# -- openai-agents ---------------------------------------------------------------------------------


def agent(served: Served, over: str, **options: Any) -> tuple[Any, Any]:
    """An agent, and how it runs, over responses or chat."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    import httpx
    import openai

    client = openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, http_client=httpx.AsyncClient(verify=False)
    )
    kind = agents.OpenAIResponsesModel if over == "responses" else agents.OpenAIChatCompletionsModel
    name = options.pop("name", "testbed")
    settings = agents.ModelSettings(temperature=0, max_tokens=options.pop("max_tokens", 6))
    given = {"name": "A", "instructions": SYSTEM["content"], "model_settings": settings, **options}
    return agents.Agent(model=kind(name, client), **given), agents.Runner


@pytest.mark.few(1)
@pytest.mark.parametrize("over", ["responses", "chat"])
def test_an_agent_of_openai_is_told_the_same_whole_and_as_a_stream(served: Served, over):
    made, runner = agent(served, over)
    url = "data:image/png;base64," + png(frames()[1])
    content = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": ASK},
    ]
    asked = [{"role": "user", "content": content}]

    async def run() -> tuple[str, str, str]:
        first = await runner.run(made, asked)
        again = await runner.run(made, [*first.to_input_list(), {"role": "user", "content": "and 4?"}])
        streamed, text = runner.run_streamed(made, asked), ""
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return first.final_output, again.final_output, text

    first, again, streamed = asyncio.run(run())
    history = [SYSTEM, user(ASK, frames()[1])]
    assert first == said(history)
    assert again == said([*history, {"role": "assistant", "content": first}, user("and 4?")])
    assert streamed == first


@pytest.mark.few(1)
@pytest.mark.parametrize("over", ["responses", "chat"])
def test_an_agent_of_openai_runs_its_tool_and_names_errors(calling: Served, over):
    agents = pytest.importorskip("agents")
    import openai

    asked: list[str] = []

    async def used(context: Any, arguments: str) -> str:
        asked.append(arguments)
        return "it is empty"

    tool = agents.FunctionTool(
        name="read",
        description="",
        params_json_schema={"type": "object", "properties": {}},
        on_invoke_tool=used,
        strict_json_schema=False,
    )
    options = {"name": "tiny", "tools": [tool], "max_tokens": 120, "instructions": None}
    made, runner = agent(calling, over, **options, tool_use_behavior="stop_on_first_tool")
    result = asyncio.run(runner.run(made, "Read a."))
    assert json.loads(asked[0]) == {"path": "a"} and result.final_output == "it is empty"
    wrong, _ = agent(calling, over, name="gpt")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        asyncio.run(runner.run(wrong, "x"))


# -- smolagents ------------------------------------------------------------------------------------


def smol(served: Served, **options: Any) -> Any:
    smolagents = pytest.importorskip("smolagents")
    given = {"model_id": "testbed", "max_tokens": 6, "temperature": 0, **options}
    client = {"max_retries": 0, "http_client": plain()}
    return smolagents.OpenAIServerModel(
        api_base=f"{served.url}/v1", api_key=KEY, client_kwargs=client, **given
    )


def test_smolagents_is_told_the_same_whole_and_as_a_stream_with_pictures(served: Served):
    model = smol(served)
    system = {"role": "system", "content": [{"type": "text", "text": SYSTEM["content"]}]}
    content = [{"type": "image", "image": frames()[2]}, {"type": "text", "text": ASK}]
    answer = model.generate([system, {"role": "user", "content": content}])
    assert answer.content == said([SYSTEM, user(ASK, frames()[2])])
    assert answer.token_usage.output_tokens > 0
    asked = {"role": "user", "content": [{"type": "text", "text": LONG}]}
    pieces = list(model.generate_stream([asked]))
    assert "".join(p.content or "" for p in pieces) == said([user(LONG)])
    stream = smol(served, max_tokens=400).generate_stream([asked])
    next(stream)
    stream.close()
    settled(served)


def test_smolagents_calls_a_tool_and_names_errors(calling: Served):
    smolagents = pytest.importorskip("smolagents")
    import openai

    class Read(smolagents.Tool):
        name, description, inputs, output_type = "read", "", {}, "string"

        def forward(self) -> str:
            return "it is empty"

    asked = [{"role": "user", "content": [{"type": "text", "text": "Read a."}]}]
    options = {"model_id": "tiny", "max_tokens": 200}
    answer = smol(calling, **options, tool_choice="auto").generate(asked, tools_to_call_from=[Read()])
    (call,) = answer.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("read", {"path": "a"})
    forced = smol(calling, **options).generate(asked, tools_to_call_from=[Read()])  # its own is "required"
    assert not forced.content and forced.tool_calls[0].function.name == "read"
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        smol(calling, **options, tool_choice="most").generate(asked, tools_to_call_from=[Read()])


# -- litellm ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_litellm_is_told_the_same_over_every_api(served: Served, calling: Served, monkeypatch):
    """Optional: it takes 200 MB, and seconds to import."""
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    messages = [SYSTEM, user(ASK, frames()[3])]
    asked = {"model": "openai/testbed", "api_base": f"{served.url}/v1", "api_key": KEY, "max_tokens": 6}
    asked |= {"temperature": 0, "num_retries": 0}
    answer = litellm.completion(messages=[*map(as_chat, messages)], **asked)
    assert answer.choices[0].message.content == said(messages)
    pieces = list(litellm.completion(messages=[user(LONG)], stream=True, **asked))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == said([user(LONG)])
    anthropics = {**asked, "model": "anthropic/testbed", "api_base": served.url}
    answer = litellm.completion(messages=[*map(as_chat, messages)], **anthropics)
    assert answer.choices[0].message.content == said(messages)
    answer = litellm.responses(
        input=ASK,
        instructions=SYSTEM["content"],
        max_output_tokens=6,
        **{name: asked[name] for name in ("model", "api_base", "api_key", "temperature")},
    )
    assert answer.output[0].content[0].text == said([SYSTEM, user(ASK)])
    with pytest.raises(litellm.BadRequestError, match="n is 2"):
        litellm.completion(messages=[user("x")], n=2, **asked)
    tool = {"type": "function", "function": FUNCTION}
    asked |= {"model": "openai/tiny", "api_base": f"{calling.url}/v1", "max_tokens": 120}
    answer = litellm.completion(messages=[user("Read a.")], tools=[tool], **asked)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "a"}
    stream = litellm.completion(messages=[user(LONG)], stream=True, **{**asked, "model": "openai/tiny"})
    next(iter(stream))
    stream.completion_stream.close()
    settled(served)


# -- in process ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_litellm_is_answered_in_process(calling: Served, served: Served, monkeypatch):
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    provider = in_process.provider(served.front.service)
    monkeypatch.setattr(litellm, "custom_provider_map", [{"provider": "kamera", "custom_handler": provider}])
    messages = [SYSTEM, user(ASK, frames()[4])]
    asked = {"model": "kamera/testbed", "messages": [*map(as_chat, messages)], "max_tokens": 6}
    whole = litellm.completion(**asked, temperature=0)
    assert whole.choices[0].message.content == said(messages) and whole.usage.completion_tokens > 0
    pieces = list(litellm.completion(**asked, temperature=0, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == said(messages)
    later = asyncio.run(litellm.acompletion(**asked, temperature=0))
    assert later.choices[0].message.content == said(messages)
    with pytest.raises(Exception, match="temperature is 9"):
        litellm.completion(**asked, temperature=9)
    provider = in_process.provider(calling.front.service)
    monkeypatch.setattr(litellm, "custom_provider_map", [{"provider": "kamera", "custom_handler": provider}])
    tool = {"type": "function", "function": FUNCTION}
    asked = {"model": "kamera/tiny", "messages": [user("Read a.")], "tools": [tool], "max_tokens": 120}
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "a"}
    deltas = [piece.choices[0].delta for piece in litellm.completion(**asked, stream=True)]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert json.loads(streamed.function.arguments) == {"path": "a"}
