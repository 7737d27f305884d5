"""Sessions over an engine that answers prompts, without vLLM: a client that says what it was told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kamera import ChatSession, ChunkStore
from kamera.engines import EngineCompletion, EnginePrompt
from kamera.errors import WindowFull
from kamera.ops import Blocks
from kamera.sessions import call_form
from kamera.store import CanonicalRecord, Outline, computed_base
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
    last = [prompt for prompt in client.prompts if not prompt.later][1]
    told = backbone(name).processor.decode(list(last.ids)).split("Read.")[1]
    assert all(call["function"]["name"] in told for call in turn.tool_calls)


def test_a_prompt_is_the_conversation_and_its_account_is_what_the_engine_says():
    client = calling("hermes")[1]
    chat = ChatSession(backbone("hermes"), ChunkStore.open("memory://"), engine=client)
    asked = list(ASKED)
    for number in range(3):
        turn = chat.send(asked, max_new_tokens=len(client.ids))
        prompt = [prompt for prompt in client.prompts if not prompt.later][number]
        assert turn.usage.prompt_tokens == len(prompt.ids) and turn.usage.cached_tokens == len(prompt.ids) - 2
        assert prompt.recipe.ids == prompt.ids[: len(prompt.recipe.ids)] and prompt.messages == tuple(asked)
        assert turn.token_ids == tuple(client.ids)
        asked = [*chat.messages, *ASKED]
    assert chat.usage().now.tokens == 3 * (2 + len(client.ids) - 1)


class Storing(Client):
    """A client that stores what it computes, as an engine that harvests; the numbers of its KV are zeros.

    ``ran`` are the tokens that it computed for each prompt.
    """

    def __init__(self, store: ChunkStore) -> None:
        super().__init__([7])
        self.store, self.ran = store, list[int]()

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        recipe, own = prompt.recipe, prompt.recipe.context
        self.prompts.append(prompt)
        self.put(recipe, own.anchor, "anchor", recipe.anchor_ids, 0)
        for i, part in enumerate(recipe.parts):
            if part.missing:
                names = recipe.part_names[:i]
                guarantee = "exact" if names == tuple(p.chunk_id for p in recipe.parts[:i]) else "patched"
                base = {"antecedents": names, "content": computed_base(guarantee)} if i else {}
                kind = "conditioned" if i else "canonical"
                self.put(recipe, part.chunk_id, kind, part.ids, part.start, **base)
        supplied = 0 if recipe.anchor is None else recipe.leading.borders[-1]
        self.ran.append(len(prompt.ids) - supplied)
        yield EngineCompletion("", (7,), len(prompt.ids), supplied)

    def put(self, recipe, name: str, kind: str, ids, start: int, **named) -> None:
        tokens, places = torch.tensor(ids), start + torch.arange(len(ids))[None]
        kv = Blocks([{"k": torch.zeros(1, 1, len(ids), 2)}], ((0,),))
        outline = Outline.of(tokens, places, (len(ids),))
        record = CanonicalRecord(
            name, recipe.context, tokens, places, kv, kind=kind, outline=outline, **named
        )
        if not self.store.has(record.context, name, record.antecedents, kind, record.content):
            self.store.put(record)


class Late(Storing):
    """A client that stores a moment after its answer, as an engine does that harvests in a thread."""

    def put(self, *given, **named) -> None:
        threading.Timer(0.15, super().put, given, named).start()


def pages(count: int, shown: range, placeholder: str = "") -> list[dict[str, str]]:
    """A history of ``count`` pages, of which those outside of ``shown`` are replaced, or have left."""
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Read the pages."}]
    for i in range(count):
        text = f"Page {i}: " + f"fact {i} of the town, and " * 8 if i in shown else placeholder
        if text:
            history += [{"role": "assistant", "content": f"Open {i}."}, {"role": "user", "content": text}]
    return history


@pytest.mark.parametrize("client_kind", [Storing, Late])
@pytest.mark.parametrize("placeholder", ["", "(removed)"])
def test_an_agent_that_forgets_has_the_engine_run_what_is_new(placeholder, client_kind):
    """Old pages leave, or a placeholder takes their place: that is run first, what stays behind it is not."""
    store = ChunkStore.open("memory://")
    client = client_kind(store)
    chat = ChatSession(backbone("hermes"), store, engine=client, mode="amortize", anticipates=False)
    page = len(backbone("hermes").builder.tokenize(pages(1, range(1))[-1]["content"]))
    for count in range(1, 7):
        before = sum(client.ran)
        turn = chat.send(pages(count, range(max(0, count - 3), count), placeholder), max_new_tokens=1)
        if count < 4 and client_kind is Late:
            time.sleep(0.3)  # a prompt that only grows finds what its engine has in pages
        ran = sum(client.ran) - before
        assert ran == turn.report.prefilled and (count == 1 or ran < 2 * page)
        assert count < 4 or "survivor" in {slot.origin for slot in chat.window.slots}
    fills = [prompt for prompt in client.prompts if not prompt.messages]
    assert len(fills) == (3 if placeholder else 0) and not any(prompt.later for prompt in fills)


def test_an_engine_that_stores_nothing_is_not_asked_to_fill_a_second_time():
    store = ChunkStore.open("memory://")
    client = Storing(store)
    chat = ChatSession(backbone("hermes"), store, engine=client, mode="amortize", anticipates=False)
    for count in range(1, 4):
        chat.send(pages(count, range(count)), max_new_tokens=1)
    client.put = lambda *given, **named: None
    for count in range(4, 6):
        chat.send(pages(count, range(count - 3, count), "(removed)"), max_new_tokens=1)
    assert len([prompt for prompt in client.prompts if not prompt.messages]) == 1


def test_a_prompt_that_is_longer_than_the_model_is_refused_before_it_is_tokenised():
    client, own = Client([7]), backbone("hermes")
    chat = ChatSession(own, ChunkStore.open("memory://"), engine=client)
    most = own.limits.trained
    assert most is not None
    with pytest.raises(WindowFull, match=str(most)):
        chat.send([{"role": "user", "content": "word " * 2 * most}], max_new_tokens=1)
    assert client.prompts == []


def test_nothing_is_filled_where_no_survivor_may_be_served():
    store = ChunkStore.open("memory://")
    client = Storing(store)
    chat = ChatSession(backbone("hermes"), store, engine=client, mode="forget", anticipates=False)
    for count in range(1, 6):
        chat.send(pages(count, range(max(0, count - 3), count), "(removed)"), max_new_tokens=1)
        assert chat.window.slots and {slot.guarantee for slot in chat.window.slots} == {"exact"}
    assert all(prompt.messages for prompt in client.prompts)
