"""Answers that are bound to a schema, or to calls in the model's own form."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from kamera.errors import InvalidRequest
from kamera.sessions import ChatSession, Grammar, Stream, call_form
from tests.sessions.rig import session, speaking
from tests.sessions.schemas import CASES, REFUSED, TEXT, WHOLE, record
from tests.sessions.test_tool_calls import FAMILIES, backbone

ASK = [{"role": "user", "content": "x"}]
READ = {"name": "read", "parameters": record("path", path=TEXT, lines=WHOLE, mode={"enum": ["r", "w"]})}
LOOK = {
    "name": "read",
    "parameters": record("lines", lines={**WHOLE, "maximum": 99}, mode={"enum": ["r", "w"]}),
}
STOP = {"name": "stop", "parameters": record()}
TOOLS = [{"type": "function", "function": function} for function in (READ, STOP)]


class Kept(Stream):
    """Keeps the pieces that it is told."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pieces: list[str] = []

    def tell(self, text: str) -> None:
        self.pieces.append(text)


class Wanting:
    """A logits processor of a model that wants to say these tokens, and says those of them that it may."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.start = ids, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.start = self.start or input_ids.shape[1]
        at, made = input_ids.shape[1] - self.start, scores.clone()
        made[:, self.ids[at : at + 1]] += 1e6  # what is masked stays so
        return made


def wanting(chat: ChatSession, text: str, ids: list[int] | None = None, **options: Any) -> Any:
    """The turn of a model that wants to say a text, then to end."""
    tokenizer = chat.backbone.processor
    ids = tokenizer.encode(text, add_special_tokens=False) if ids is None else ids
    ids = [*ids, tokenizer.eos_token_id]
    options = {"max_new_tokens": len(ids), "do_sample": False, **options}
    return chat.send(ASK, logits_processor=[Wanting(ids)], **options)


@pytest.fixture(scope="module")
def chat() -> ChatSession:
    return session(speaking("thinking"))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_what_fits_a_schema_can_be_said_and_nothing_else(chat: ChatSession, name):
    schema, good, bad = CASES[name]
    Draft202012Validator.check_schema(schema)
    text, wrong = (json.dumps(value, ensure_ascii=False) for value in (good, bad))
    turn = wanting(chat, text, grammar=Grammar(schema))
    assert (turn.text, turn.finish_reason) == (text, "stop")
    assert Draft202012Validator(schema).is_valid(json.loads(turn.text))
    assert wanting(chat, wrong, grammar=Grammar(schema)).text != wrong


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_whatever_is_drawn_fits_the_schema(chat: ChatSession, name, seed):
    schema, *_ = CASES[name]
    turn = chat.send(ASK, grammar=Grammar(schema), max_new_tokens=600, seed=seed)
    if turn.finish_reason == "stop":
        Draft202012Validator(schema).validate(json.loads(turn.text))
    else:
        assert len(turn.token_ids) == 600  # of numbers and texts without an end


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_bound_is_refused_where_it_is(chat: ChatSession, name):
    schema, place = REFUSED[name]
    before = chat.usage().now.tokens
    with pytest.raises(InvalidRequest, match="cannot be bound at") as caught:
        chat.send(ASK, grammar=Grammar(schema, at="text.format.schema"))
    assert f"at {place}: " in str(caught.value) and caught.value.place == "text.format.schema"
    assert chat.usage().now.tokens == before
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(InvalidRequest, match="the parameters of tool 'f' cannot be bound at"):
        session(chat.backbone, tools=[tool]).send(ASK, grammar=Grammar(tools=("f",)))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_in_the_models_own_form(family):
    """Of a model that says anything the call is read back, of a tool that was named."""
    made, tools = backbone(family), [{"type": "function", "function": f} for f in (LOOK, STOP)]
    chat, stream = session(made, tools=tools), Kept(calls=call_form(made))
    turn = chat.send(ASK, grammar=Grammar(tools=("read",)), seed=3, max_new_tokens=200, stream=stream)
    (call,) = turn.tool_calls
    assert (turn.finish_reason, turn.content, "".join(stream.pieces)) == ("stop", "", "")
    assert call["function"]["name"] == "read"
    Draft202012Validator(LOOK["parameters"]).validate(json.loads(call["function"]["arguments"]))
    with pytest.raises(InvalidRequest, match="no tool 'none'"):
        chat.send(ASK, grammar=Grammar(tools=("none",)))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["hermes", "coder", "llama, bare", "mistral", "deepseek"])
def test_a_forced_call_may_be_what_models_of_the_family_write_by_themselves(family):
    made, text = backbone(family), "".join(FAMILIES[family][2])
    text = text.replace("</tool_call><tool_call>", "</tool_call>\n<tool_call>")
    ids = made.processor.encode(text, add_special_tokens=False)
    turn = wanting(session(made, tools=TOOLS), text, ids, grammar=Grammar(tools=("read",), several=True))
    assert list(turn.token_ids[: len(ids)]) == ids and len(turn.tool_calls) == text.count("read")


def test_an_answer_may_be_a_call_or_of_the_schema():
    chat = session(speaking("thinking"), tools=TOOLS)
    either = Grammar(record(a=WHOLE), ("read", "stop"))
    assert wanting(chat, '{"a": 3}', grammar=either).text == '{"a": 3}'
    turn = wanting(chat, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', grammar=either)
    assert [call["function"]["name"] for call in turn.tool_calls] == ["stop"]
    assert wanting(chat, "I do not know.", grammar=either).text[0] in "{<"


def test_streams_stops_logprobs_and_branches_go_on_working(chat: ChatSession):
    schema, good, _ = CASES["objects in a list"]
    text, stream = json.dumps(good), Kept()
    first = wanting(chat, text, grammar=Grammar(schema), stream=stream, logprobs=2)
    assert "".join(stream.pieces) == first.text == text and sum(map(bool, stream.pieces)) > 10
    plain = chat.fork()
    unbound = wanting(plain, text, logprobs=2)
    assert first.logprobs is not None and unbound.logprobs is not None
    pairs = zip(first.logprobs, unbound.logprobs, strict=False)  # the model's own, mask or none
    assert all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-3 for a, b in pairs)
    stopped = wanting(chat, text, grammar=Grammar(schema), stream=Stream(stop=['"what"']))
    assert stopped.text == text[: text.index('"what"')] and stopped.finish_reason == "stop"
    more = [{"role": "user", "content": "and?"}]
    branch = chat.send(more, after=first.turn_id, grammar=Grammar({"const": "so"}), max_new_tokens=9)
    assert branch.text == '"so"' and branch.report.kept > 20
    with pytest.raises(ValueError, match="no beams"):
        chat.send(ASK, grammar=Grammar(TEXT), num_beams=2)


def test_an_answer_ends_with_its_grammar_where_the_model_has_no_end(chat: ChatSession):
    schema = {"const": [1, 2]}
    bound = chat.send(ASK, grammar=Grammar(schema), max_new_tokens=50, eos_token_id=None, do_sample=False)
    assert bound.text == "[1, 2]" and bound.finish_reason == "stop"
    exact = chat.send(ASK, grammar=Grammar(schema), max_new_tokens=len(bound.token_ids), do_sample=False)
    assert exact.text == "[1, 2]" and exact.finish_reason == "stop"
    cut = chat.send(ASK, grammar=Grammar(schema), max_new_tokens=2, do_sample=False)
    assert cut.finish_reason == "length"


def test_without_the_library_the_refusal_says_how_to_get_it(chat: ChatSession, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r'pip install "kamera-kv\[serve\]"'):
        chat.send(ASK, grammar=Grammar(TEXT))
    assert chat.send(ASK, max_new_tokens=2, do_sample=False).text
