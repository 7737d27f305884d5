"""Conversations over vLLM's server: sessions, pools, `kamera serve`, and what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

import openai

from kamera import Backbone, ChatSession, ChunkStore, ReusePolicy, SessionPool, testbed
from kamera.edits import Directive, policies
from kamera.engines.vllm.clients import Http
from kamera.errors import EngineFailed, KameraError, UnsupportedByEngine
from kamera.sessions import Stream
from kamera.testbed import World
from tests.engines.vllm.server import serving
from tests.serve.rig import as_chat

SYSTEM = {"role": "system", "content": testbed.SYSTEM}
EXACT = ReusePolicy.exact()


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("bed")) as running:
        backbone = Backbone.from_pretrained(running.model, dtype="float32", by_files=True).engine
        yield running, backbone, Http(running.client, "bed", priorities=True)


def asked(frame, text="What is on the desk?"):
    return {"role": "user", "content": [*frame.content, {"type": "text", "text": text}]}


def plain(running, messages, salt="plain", **options):
    """The server's own answer to a conversation, as an unchanged client gets it."""
    given = {"temperature": 0.0, "max_completion_tokens": 4, **options}
    told = list(map(as_chat, messages))
    return running.client.chat.completions.create(
        model="bed", messages=told, extra_body={"cache_salt": salt}, **given
    )


def settled(session):
    """Wait until the engine has stored what a session's window shows."""
    session.anticipate()
    session.flush()
    before = None
    for _ in range(100):
        origins = [slot.origin for slot in session.window.look()]
        if origins == before and "computed" not in origins:
            return
        before = origins
        time.sleep(0.2)


class Heard(Stream):
    def __init__(self, *stop):
        super().__init__(stop)
        self.pieces = []

    def tell(self, text):
        self.pieces += [text] if text else []


def test_a_conversation_under_exact_reuse_gets_the_servers_own_answers(bed):
    running, backbone, engine = bed
    store = ChunkStore.open(running.store, tenant="exact")
    session = ChatSession(backbone, store, policy=EXACT, engine=engine)
    frames = World(800_000).episode(1, layout="LLLI").frames
    for frame in frames[:3]:
        stream = Heard()
        wanted = plain(running, [SYSTEM, *session.messages[1:], asked(frame)])
        turn = session.send([*(session.messages or [SYSTEM]), asked(frame)], stream=stream, max_new_tokens=4)
        assert turn.text == wanted.choices[0].message.content == "".join(stream.pieces)
        assert turn.usage.prompt_tokens == wanted.usage.prompt_tokens == len(session.prompt_ids)
        assert turn.usage.completion_tokens == len(turn.token_ids) and turn.finish_reason == "stop"
        assert turn.report.guarantee == "exact"
        report = turn.report
        assert report.kept + report.turned + report.patched + report.prefilled == turn.usage.prompt_tokens
    edited = [SYSTEM, *session.messages[3:], asked(frames[3])]
    turn = session.send(edited, max_new_tokens=4)
    assert turn.text == plain(running, edited).choices[0].message.content
    assert turn.report.left > 0 and session.history(turn.turn_id)[-1]["content"] == turn.text
    assert session.usage().now.tokens > turn.report.prefilled > 0


def test_a_sliding_window_of_pictures_keeps_its_hits_as_vllm_omni_369_asks(bed):
    """vllm-omni #369: five segments; prefix caching hits while they fill, and not at all once one leaves."""
    running, backbone, engine = bed
    store = ChunkStore.open(running.store, tenant="omni")
    session = ChatSession(
        backbone, store, engine=engine, edit_policy=policies.keep_last_images(5, placeholder=None)
    )
    world = World(800_000)
    frames = [frame for n in range(2) for frame in world.episode(n, layout="LLLI").frames]
    ours, theirs, shares = [], [], []
    for n, frame in enumerate(frames):
        said = [*(session.messages or [SYSTEM]), asked(frame)]
        shaped = policies.keep_last_images(5, placeholder=None)(said, n)
        theirs.append(plain(running, shaped, salt="prefix").usage.prompt_tokens_details.cached_tokens)
        turn = session.send(said, max_new_tokens=2)
        ours.append(turn.usage.cached_tokens)
        shares.append(turn.usage.cached_tokens / turn.usage.prompt_tokens)
        settled(session)
    assert theirs[4] > 200  # while the window fills
    assert max(theirs[5:]) < 100  # the avalanche: no more than what stands before the first picture
    assert min(shares[5:]) > 0.5 and min(ours[5:]) > 200
    assert {slot.guarantee for slot in session.window.slots} <= {"exact", "patched", "survivor"}
    later = session.usage().background
    assert later.forwards > 0 and later.tokens > 0


def test_a_session_streams_stops_and_draws_by_seed(bed):
    running, backbone, engine = bed
    store = ChunkStore.open(running.store, tenant="stream")
    session = ChatSession(backbone, store, engine=engine)
    whole = session.send([SYSTEM, {"role": "user", "content": "value of tag 3?"}], max_new_tokens=12)
    again = session.fork()
    drawn = [
        session.fork().send("and tag 4?", max_new_tokens=24, seed=seed, temperature=2.0).token_ids
        for seed in (7, 7, 8, 9, 10, 11)
    ]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1
    stream = Heard(whole.text[1:3])
    turn = again.fork().send(
        [SYSTEM, {"role": "user", "content": "value of tag 3?"}], max_new_tokens=12, stream=stream
    )
    assert turn.text == whole.text[:1] == "".join(stream.pieces)
    assert (turn.finish_reason, stream.stopped) == ("stop", whole.text[1:3])


def test_what_an_engine_cannot_do_is_refused_in_a_line(bed, tmp_path):
    running, backbone, engine = bed
    store = ChunkStore.open(running.store, tenant="refused")
    for options in ({"trace": tmp_path / "trace"}, {"uncached": True}, {"reuse": True}):
        with pytest.raises(UnsupportedByEngine, match=next(iter(options))):
            ChatSession(backbone, store, engine=engine, **options)
    for options in ({"save": tmp_path}, {"uncached": True}):
        with pytest.raises(UnsupportedByEngine, match=next(iter(options))):
            SessionPool(backbone, store, engine=engine, **options)
    session = ChatSession(backbone, store, engine=engine)
    session.send([SYSTEM, {"role": "user", "content": "value of tag 3?"}], max_new_tokens=2)
    before = session.messages
    refused = (
        lambda: session.send("x", logprobs=3),
        lambda: session.send("x", num_beams=2),
        lambda: session.next_token_logits("x"),
        lambda: session.save(tmp_path / "saved"),
    )
    for call in refused:
        with pytest.raises(UnsupportedByEngine) as error:
            call()
        assert "\n" not in str(error.value)
    gone = ChatSession(
        backbone,
        store,
        engine=Http(openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0), "bed"),
    )
    with pytest.raises(EngineFailed, match="APIConnectionError"):
        gone.send([SYSTEM, {"role": "user", "content": "x"}])
    assert gone.messages == [] and session.messages == before and not (tmp_path / "saved").exists()
    session.send("and tag 4?", max_new_tokens=2)
    after = session.messages
    report = session.edit([Directive(1, 3, unit="messages")])
    assert report.left > 0 and session.messages == [after[0], *after[3:]]


def test_a_pool_keeps_tenants_apart_and_knows_its_conversations(bed):
    running, backbone, engine = bed
    stores = {name: ChunkStore.open(running.store, tenant=name) for name in ("red", "blue")}
    pool = SessionPool(backbone, stores.__getitem__, engine=engine)
    frame = World(800_000).episode(2, layout="LLLI").frames[0]
    first = pool.send([SYSTEM, asked(frame)], tenant="red", max_new_tokens=4)
    history = pool.history(first.turn_id, "red")
    second = pool.send([*history, asked(frame, "And now?")], tenant="red", max_new_tokens=4)
    assert second.session_id == first.session_id and second.usage.cached_tokens > 60
    pool.flush()
    other = pool.send([*history, asked(frame, "And now?")], tenant="blue", max_new_tokens=4)
    assert other.session_id != first.session_id and other.usage.cached_tokens == 0
    with pytest.raises(KameraError):
        pool.history(first.turn_id, "blue")


def test_kamera_serve_over_an_engine_answers_an_unchanged_client(bed, tmp_path):
    running, _, _ = bed
    keys = tmp_path / "keys"
    keys.write_text("acme a-key-of-acme-here\nother a-key-of-another\n", encoding="utf-8")
    command = [sys.executable, "-m", "kamera", "serve", str(running.model), "--engine", running.url]
    command += [
        "--store",
        str(running.store),
        "--port",
        "0",
        "-q",
        "--dtype",
        "float32",
        "--mode",
        "amortize",
    ]
    command += ["--keys", str(keys), "--name", "front"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    frame = World(800_000).episode(3, layout="LLLI").frames[0]
    tools = [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            url = process.stdout.readline().split()[-1]
            acme, other = (
                openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
                for key in ("a-key-of-acme-here", "a-key-of-another")
            )
            messages = [as_chat(m) for m in (SYSTEM, asked(frame))]
            given = {"model": "front", "max_tokens": 4, "temperature": 0, "messages": messages}
            wanted = plain(running, [SYSTEM, asked(frame)]).choices[0].message.content
            answer = acme.chat.completions.create(**given)
            assert answer.choices[0].message.content == wanted
            again = acme.chat.completions.create(**given)
            assert again.usage.prompt_tokens_details.cached_tokens > 60
            events = list(acme.chat.completions.create(**given, stream=True))
            assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == wanted
            assert other.chat.completions.create(**given).usage.prompt_tokens_details.cached_tokens == 0
            called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"tag": 3}'}}
            given["messages"] = [
                *messages,
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "c1", "content": "value of tag 3?"},
            ]
            shown = acme.chat.completions.create(**given, tools=tools)
            assert shown.usage.prompt_tokens > answer.usage.prompt_tokens
            assert shown.model_extra["kamera"]["prefilled"] > 0
            # of no prompt did the server make other tokens than its recipe says
            assert ("refused_requests", "recipe") not in running.counted()
            with pytest.raises(openai.BadRequestError, match="logprobs"):
                acme.chat.completions.create(**given, logprobs=True)
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_the_example_shows_what_is_computed_once_pictures_leave(bed):
    running, _, _ = bed
    command = [sys.executable, "examples/vllm_conversation.py", "--model", str(running.model)]
    command += [
        "--store",
        str(running.store),
        "--url",
        running.url,
        "--turns",
        "5",
        "--keep",
        "2",
        "--dtype",
        "float32",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = re.findall(r"turn \d: (\d+) of (\d+) tokens computed, (\d+) left, (\w+)", done.stdout)
    assert len(lines) == 5 and "later 0 forwards" not in done.stdout
    slid = [(int(computed), int(prompt)) for computed, prompt, left, _ in lines if int(left)]
    assert slid and all(computed < 0.7 * prompt for computed, prompt in slid)
