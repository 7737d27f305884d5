"""OpenAI's and Anthropic's own clients are told what a session says, and what it costs."""

from __future__ import annotations

import threading
import time

import anthropic
import httpx
import openai
import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.serve import worker
from tests.serve.rig import SYSTEM, Served, as_chat, backbone, frames, png, said, serving, user

ASK = "What is the value of tag 3?"
LONG = "value of tag 3?"  # the backbone does not come to an end
GREEDY = {"model": "testbed", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


def test_a_chat_that_sends_its_whole_history_each_turn_stays_one_session(served: Served):
    client, history, names, before = served.openai(), [SYSTEM], set(), 0
    for turn in range(3):
        history.append(user(f"{ASK} And {turn}?", frames()[turn]))
        answer = client.chat.completions.create(messages=list(map(as_chat, history)), **GREEDY)
        text = answer.choices[0].message.content
        assert text == said(history) and answer.choices[0].finish_reason == "stop"
        report = answer.model_extra["kamera"]
        usage = answer.usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - report["prefilled"]
        cached = report["kept"] + report["turned"] + report["patched"]
        assert usage.prompt_tokens_details.cached_tokens == cached
        assert usage.completion_tokens <= 6 and report["guarantee"] == "exact"
        assert report["kept"] > before - 20  # all that stood before
        before = usage.prompt_tokens
        names.add(report["session_id"])
        history.append({"role": "assistant", "content": text})
    assert len(names) == 1


def test_a_stream_of_a_chat_tells_the_same(served: Served):
    messages = [user(LONG)]
    whole = said(messages, 8)
    options = {**GREEDY, "max_tokens": 8, "stream_options": {"include_usage": True}}
    chunks = list(
        served.openai().chat.completions.create(messages=list(map(as_chat, messages)), stream=True, **options)
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole and sum(map(bool, pieces)) > 2
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-2].choices[0].finish_reason == "length"
    stop = whole[4:7]
    options = {**GREEDY, "max_tokens": 8, "stop": [stop]}
    chunks = list(
        served.openai().chat.completions.create(messages=list(map(as_chat, messages)), stream=True, **options)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_anthropics_client_is_told_the_same_whole_and_as_a_stream(served: Served):
    client, image = served.anthropic(), frames()[1]
    plain = {"model": "testbed", "max_tokens": 6}  # greedy, as the model's own settings are
    source = {"type": "base64", "media_type": "image/png", "data": png(image)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": ASK}]
    asked = {"messages": [{"role": "user", "content": content}], "system": SYSTEM["content"], **plain}
    whole = said([SYSTEM, user(ASK, image)])
    answer = client.messages.create(**asked)
    assert answer.content[0].text == whole and answer.stop_reason == "end_turn"
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    counted = {name: asked[name] for name in ("messages", "system", "model")}
    assert client.messages.count_tokens(**counted).input_tokens == total
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole == final.content[0].text
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert final.usage.cache_read_input_tokens > answer.usage.cache_read_input_tokens
    whole = said([user(LONG)])
    with client.messages.stream(messages=[user(LONG)], stop_sequences=[whole[6:9]], **plain) as stream:
        stopped = stream.get_final_message()
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", whole[6:9])
    assert stopped.content[0].text == whole[: whole.index(whole[6:9])]


def test_responses_go_on_from_any_turn_and_lose_a_deleted_one(served: Served):
    client = served.openai()
    options = {
        "model": "testbed",
        "instructions": SYSTEM["content"],
        "max_output_tokens": 6,
        "temperature": 0,
    }
    first = client.responses.create(input="value of tag 3?", **options)
    assert first.output_text == said([SYSTEM, user("value of tag 3?")])
    second = client.responses.create(input="and 4?", previous_response_id=first.id, **options)
    turns = [SYSTEM, user("value of tag 3?"), {"role": "assistant", "content": first.output_text}]
    assert second.output_text == said([*turns, user("and 4?")])
    assert second.model_extra["kamera"]["session_id"] == first.model_extra["kamera"]["session_id"]
    branch = client.responses.create(input="or 5?", previous_response_id=first.id, **options)
    assert branch.output_text == said([*turns, user("or 5?")])  # the second turn is not in it
    again = client.responses.retrieve(second.id)
    assert again.output_text == second.output_text and again.usage == second.usage
    rest = [SYSTEM, user("and 4?"), {"role": "assistant", "content": second.output_text}, user("so?")]
    client.responses.delete(first.id)
    third = client.responses.create(input="so?", previous_response_id=second.id, **options)
    assert third.output_text == said(rest) and third.usage.input_tokens < 45
    for name in (first.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.BadRequestError, match="is not here"):
            client.responses.create(input="x", previous_response_id=name, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("minimum", [None, "exact"])
def test_a_chat_goes_on_from_any_turn_of_its_own_key_by_its_id(served: Served, minimum):
    chat = served.openai().chat.completions
    opening = [SYSTEM, user("value of tag 6?")]
    first = chat.create(messages=opening, **GREEDY)
    turn = first.model_extra["kamera"]["turn_id"]
    there = [*opening, {"role": "assistant", "content": first.choices[0].message.content}]
    told = {"kamera": {"after": turn, "minimum": minimum}}
    for text in ("and 7?", "or 8?"):  # the second is a branch
        answer = chat.create(messages=[user(text)], extra_body=told, **GREEDY)
        assert answer.choices[0].message.content == said([*there, user(text)])
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
    with pytest.raises(openai.NotFoundError, match="no turn 'nobody' here"):
        chat.create(messages=[user("x")], extra_body={"kamera": {"after": "nobody"}}, **GREEDY)


def test_a_response_has_its_own_instructions_wherever_it_goes_on(served: Served):
    client, options = served.openai(), {"model": "testbed", "max_output_tokens": 6, "temperature": 0}
    first = client.responses.create(input="tag 1?", instructions=SYSTEM["content"], **options)
    turns = [user("tag 1?"), {"role": "assistant", "content": first.output_text}, user("and 2?")]
    for own in (SYSTEM["content"], "Be brief.", None):
        given = {} if own is None else {"instructions": own}
        answer = client.responses.create(input="and 2?", previous_response_id=first.id, **given, **options)
        system = [] if own is None else [{"role": "system", "content": own}]
        assert answer.output_text == said([*system, *turns])


def test_a_stream_of_a_response_tells_the_same_and_is_kept(served: Served):
    client, asked = (
        served.openai(),
        {"model": "testbed", "input": LONG, "max_output_tokens": 6, "temperature": 0},
    )
    events = list(client.responses.create(stream=True, **asked))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    kept = client.responses.retrieve(events[-1].response.id)
    assert text == said([user(LONG)]) == kept.output_text == events[-1].response.output_text
    forgotten = client.responses.create(store=False, **asked)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(forgotten.id)


def test_equal_seeds_draw_equally_and_others_do_not(served: Served):
    client, asked = served.openai(), {**GREEDY, "temperature": 1.9, "max_tokens": 12, "messages": [user(ASK)]}
    texts = [client.chat.completions.create(seed=s, **asked).choices[0].message.content for s in (5, 6, 5)]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("state", range(4))
def test_greedy_answers_are_equal_from_every_state_of_the_cache(served: Served, state):
    client, messages = served.openai(), [SYSTEM, *(user(f"tag {i}?") for i in range(4)), user(ASK)]
    client.chat.completions.create(messages=messages[: 2 + state], **GREEDY)  # what came before differs
    text = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content
    assert text == said(messages)


def test_clients_at_once_are_answered_as_each_alone(served: Served):
    found: dict[int, list[dict]] = {}

    def talk(number: int) -> None:
        history = [SYSTEM, user(f"value of tag {number % 3}?")]  # some send the same at once
        for text in ("and 5?", "and 6?"):
            answer = served.openai().chat.completions.create(messages=history, **GREEDY)
            history += [{"role": "assistant", "content": answer.choices[0].message.content}, user(text)]
        found[number] = history

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for history in (found[number] for number in range(6)):
        assert [history[2]["content"], history[4]["content"]] == [said(history[:2]), said(history[:4])]


def test_what_is_wrong_is_the_clients_own_error(served: Served):
    with pytest.raises(openai.BadRequestError, match="n is 2"):
        served.openai().chat.completions.create(messages=[user("x")], n=2, **GREEDY)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        served.openai().chat.completions.create(messages=[user("x")], model="gpt")
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        served.anthropic().messages.create(
            messages=[user("x")], tool_choice={"type": "most"}, model="testbed", max_tokens=2
        )
    with pytest.raises(anthropic.NotFoundError):
        served.anthropic().messages.create(messages=[user("x")], model="claude", max_tokens=1)
    assert [m.id for m in served.openai().models.list()] == ["testbed"]
    assert served.openai().models.retrieve("testbed").id == "testbed"


def test_a_client_that_goes_away_frees_the_worker(served: Served):
    """Of an answer of 4,000 tokens few are made; the session is as it was."""
    before = backbone().model.generation_config.eos_token_id
    backbone().model.generation_config.eos_token_id = None  # it goes on until it is stopped
    try:
        body = {"model": "testbed", "max_tokens": 4000, "messages": [user(ASK)], "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        thread = threading.Thread(target=_impatient, args=(served, {**body, "stream": False}))
        thread.start()
        thread.join()
        done = served.front.worker.done
        for _ in range(500):
            if served.front.worker.waiting == 0 and served.front.worker.done >= done:
                break
            time.sleep(0.01)
        answer = served.post("/v1/chat/completions", {**body, "stream": False, "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert served.front.service.counts("")["failed"] >= 2
    finally:
        backbone().model.generation_config.eos_token_id = before


def _impatient(served: Served, body: dict) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=0.5)


def test_logprobs_are_told_over_both_apis_whole_and_as_a_stream(served: Served):
    messages, client = [SYSTEM, user(LONG)], served.openai()
    asked = {**GREEDY, "messages": messages, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked).choices[0]
    told = answer.logprobs.content
    assert "".join(one.token for one in told) == answer.message.content == said(messages)
    assert all(one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 2 for one in told)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in told]
    chat = ChatSession(backbone(), ChunkStore.open("memory://"), policy=ReusePolicy.exact())
    truth = chat.next_token_logits(messages).log_softmax(-1)
    assert told[0].logprob == pytest.approx(float(truth.max()), abs=1e-3)
    other = client.responses.create(
        model="testbed",
        input=messages,
        max_output_tokens=6,
        temperature=0,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
    )
    part = other.output[0].content[0]
    assert [one.token for one in part.logprobs] == [one.token for one in told]
    assert part.logprobs[0].logprob == pytest.approx(told[0].logprob, abs=1e-4)
    assert (
        client.chat.completions.create(**{**asked, "logprobs": False, "top_logprobs": 0}).choices[0].logprobs
        is None
    )


def test_logprobs_end_where_a_stop_string_begins(served: Served):
    whole = said([user(LONG)])
    asked = {**GREEDY, "messages": [user(LONG)], "logprobs": True, "stop": [whole[4:7]]}
    answer = served.openai().chat.completions.create(**asked).choices[0]
    text = "".join(one.token for one in answer.logprobs.content)
    assert text.startswith(answer.message.content) and len(answer.logprobs.content) < 6


def test_an_answer_that_takes_too_long_is_a_504(served: Served, monkeypatch):
    monkeypatch.setattr(worker, "TIMEOUT", 0.0)
    answer = served.post("/v1/chat/completions", {**GREEDY, "messages": [user(ASK)]})
    assert answer.status_code == 504 and "fewer tokens" in answer.json()["error"]["message"]


def test_entries_that_clients_send_and_that_change_nothing_are_taken(served: Served):
    """Names, thoughts, empty answers and labels of all three APIs: the answer is that without them."""
    chat, claude = served.openai(), served.anthropic()
    history = [user("a"), {"role": "assistant", "content": "b"}, user(LONG)]
    thought = {**history[1], "reasoning_content": "hm", "refusal": None, "annotations": [{"type": "x"}]}
    labels = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_retention": "24h"}
    sent = [{**history[0], "name": "bob"}, thought, history[2]]
    answer = chat.chat.completions.create(messages=sent, **labels, **GREEDY)
    assert answer.choices[0].message.content == said(history)
    assert answer.model_extra["kamera"]["dropped"] == ["reasoning_content"]  # its template shows none
    empty = [history[0], {"role": "assistant", "content": None}, history[2]]
    answer = chat.chat.completions.create(messages=empty, **GREEDY)
    assert answer.choices[0].message.content == said([empty[0], {**empty[1], "content": ""}, empty[2]])

    picture = as_chat(user("?", frames()[0]))
    picture["content"][0]["image_url"]["detail"] = "low"
    answer = chat.chat.completions.create(messages=[picture], **GREEDY)
    assert answer.choices[0].message.content == said([user("?", frames()[0])])

    asked = {"model": "testbed", "max_output_tokens": 2, "temperature": 0}
    options = {"reasoning": {"effort": None}, "stream_options": {"include_obfuscation": False}}
    options |= {"truncation": "auto", "include": ["reasoning.encrypted_content"], "text": {"verbosity": None}}
    first = chat.responses.create(input="a", **asked, **options)
    (item,) = first.output
    assert first.status == "incomplete"
    own = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {**item.model_dump(), "status": "incomplete", "phase": "final_answer"},
        {"role": "user", "content": LONG},
    ]
    second = chat.responses.create(input=own, **asked)
    told = [user("a"), {"role": "assistant", "content": first.output_text}, user(LONG)]
    assert second.output_text == said(told, 2)

    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "b"}]
    answer = claude.messages.create(
        model="testbed",
        max_tokens=6,
        messages=[history[0], {"role": "assistant", "content": blocks}, user(LONG)],
    )
    assert answer.content[0].text == said(history)
