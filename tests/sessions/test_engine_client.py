"""Sessions over an engine that answers prompts, without vLLM: a client that says what it was told to."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kamera import ChatSession, ChunkStore
from kamera.engines import EngineCompletion, EnginePrompt
from kamera.sessions import call_form
from tests.sessions.test_tool_calls import FAMILIES, ONE, TOOLS, TWO, Told, backbone, before

ASKED = [{"role": "user", "content": "Read."}]


class Client:
    """Says ``ids``, one in each piece, and keeps the prompts; all but the last two tokens were cached."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.prompts = ids, list[EnginePrompt]()

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        self.prompts.append(prompt)
        for token in self.ids:
            yield EngineCompletion("", (token,), 0, 0)
        yield EngineCompletion("", (), len(prompt.ids), len(prompt.ids) - 2)


def calling(name: str) -> tuple[str, Client]:
    """A reply of a family that calls tools, and a client that says it."""
    said = before(name) + "".join(FAMILIES[name][2])
    return said, Client([int(i) for i in backbone(name).builder.tokenize(said)])


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_an_engines_reply_are_read_as_those_of_a_model_in_process(name):
    said, client = calling(name)
    count = 2 if '"b;{"' in said or "b;{\n" in said else 1
    chat = ChatSession(backbone(name), ChunkStore.open("memory://"), engine=client, tools=TOOLS)
    stream = Told(calls=call_form(backbone(name)))
    turn = chat.send(ASKED, stream=stream, max_new_tokens=len(client.ids))
    assert [json.loads(call["function"]["arguments"]) for call in turn.tool_calls] == [ONE, TWO][:count]
    assert turn.content.strip() == before(name).strip() == "".join(stream.pieces)
    assert client.prompts[0].tools == TOOLS
    rest = [{"role": "tool", "tool_call_id": call["id"], "content": "empty"} for call in turn.tool_calls]
    history = [*ASKED, {"role": "assistant", "content": turn.content, "tool_calls": list(turn.tool_calls)}]
    chat.send([*history, *rest], max_new_tokens=1)
    told = backbone(name).processor.decode(list(client.prompts[1].ids)).split("Read.")[1]
    assert all(call["function"]["name"] in told for call in turn.tool_calls)


def test_a_prompt_is_the_conversation_and_its_account_is_what_the_engine_says():
    client = calling("hermes")[1]
    chat = ChatSession(backbone("hermes"), ChunkStore.open("memory://"), engine=client)
    asked = list(ASKED)
    for number in range(3):
        turn = chat.send(asked, max_new_tokens=len(client.ids))
        prompt = client.prompts[number]
        assert turn.usage.prompt_tokens == len(prompt.ids) and turn.usage.cached_tokens == len(prompt.ids) - 2
        assert prompt.recipe.ids == prompt.ids[: len(prompt.recipe.ids)] and prompt.messages == tuple(asked)
        assert turn.token_ids == tuple(client.ids)
        asked = [*chat.messages, *ASKED]
    assert chat.usage().now.tokens == 3 * (2 + len(client.ids) - 1)
