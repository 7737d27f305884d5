"""The price of turns: agents' clients edit as recorded, and what runs is counted where it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kamera.content import Conversations
from kamera.edits import apply_policy
from kamera.engines.hf import HfEngine
from kamera.sessions.owners import Tails
from lab.price.__main__ import main
from lab.price.agents import Session, requests, run
from lab.price.counting import named, shared
from lab.price.scripts import AGENTS, Agent
from lab.replay.shapes import thin
from lab.replay.ways import WAYS

RECORDED = Path(__file__).parents[1] / "edits" / "recorded"
NAMED = {agent.name: agent for agent in AGENTS}


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return thin(1, "thinking")


def recording(agent: Agent) -> dict[str, Any]:
    return json.loads((RECORDED / f"{agent.recording}.json").read_text())


def form(message: dict[str, Any]) -> tuple[Any, ...]:
    """Role and kinds of content of a message, in OpenAI's words."""
    content = message["content"]
    if isinstance(content, str):
        return message["role"], ("text",) if content else ()
    kinds = [item["type"] for item in content]
    if "tool_result" in kinds:
        (result,) = content
        inner = result["content"]
        return "tool", ("text",) if isinstance(inner, str) else tuple(map(kind, inner))
    return message["role"], tuple(kind(i) for i in content if i["type"] != "tool_use")


def kind(item: dict[str, Any]) -> str:
    return "image" if item["type"].endswith(("image", "image_url")) else str(item["type"])


def blank(_: int) -> Image.Image:
    return Image.new("RGB", (32, 32))


@pytest.mark.parametrize("name", NAMED)
def test_a_script_has_the_forms_and_the_rule_of_the_recorded_agent(name):
    agent = NAMED[name]
    held = recording(agent)
    policy, (n,), options = held["rule"]
    assert policy == "keep_last_images" and options.get("batch", 1) == agent.batch
    full = agent.history(20, blank)
    kept = apply_policy(agent.rule(n, agent.batch), full, 20)
    *_, last = held["requests"]
    for mine, theirs in ((full, last["full"]), (kept, last["kept"])):
        recorded = {form(held["messages"][i]) for i in theirs}
        assert {form(message) for message in mine} <= recorded


@pytest.mark.parametrize("name", NAMED)
def test_a_prefix_cache_runs_what_the_turn_adds_until_a_picture_leaves(name, backbone):
    conversations = Conversations(backbone.processor)
    agent = NAMED[name]
    asked = list(requests(backbone, conversations, Session(agent, 2, 16, 14, 4)))
    first = next((i for i, r in enumerate(asked) if r.prefix > r.new), len(asked))
    assert all(r.prefix == r.new for r in asked[:first])
    counted = {
        i: sum(item["type"] == "image" for m in r.messages for item in m["content"] if isinstance(item, dict))
        for i, r in enumerate(asked)
    }
    most = 2 + (agent.batch - 1) + (name in ("cua", "OmniParser"))  # their task shows a picture of its own
    assert max(counted.values()) == most
    assert sum(r.batched for r in asked) <= sum(r.prefix for r in asked)
    assert sum(r.longer for r in asked) >= sum(r.prompt for r in asked)


def test_two_pictures_of_one_size_are_no_common_prefix(backbone):
    """Their tokens have one id: pixels tell them apart."""
    conversations, placeholder = Conversations(backbone.processor), backbone.model.config.image_token_id
    one, other = (
        conversations.render(
            [{"role": "user", "content": [{"type": "image", "image": Image.new("L", (32, 32), grey)}]}]
        )
        for grey in (0, 255)
    )
    assert one.ids.equal(other.ids)
    at = one.ids.tolist().index(placeholder)
    assert shared(named(one, placeholder), named(other, placeholder)) == at
    assert shared(named(one, placeholder), named(one, placeholder)) == len(one.ids) - 1


@pytest.mark.parametrize(
    ("cached", "prompt", "same"),
    [([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2, 3], 2), ([], [1], 0), ([2], [1, 2], 0)],
)
def test_the_last_token_of_a_prompt_is_run(cached: Sequence[int], prompt: Sequence[int], same: int):
    assert shared(cached, prompt) == same


@pytest.mark.parametrize("name", ["AutoGLM", "cua"])
def test_a_session_says_what_the_agent_says_and_exact_runs_what_a_prefix_cache_runs(name, backbone):
    conversations, agent = Conversations(backbone.processor), NAMED[name]
    asked = list(requests(backbone, conversations, Session(agent, 2, 16, 6, 4)))
    for turn, request in enumerate(asked):
        answer = conversations.decode(request.answer)
        assert answer.startswith(agent.said(turn)["content"]) and answer.endswith("<|im_end|>")
    turns = run(backbone, asked, WAYS["exact"])
    ran = [tokens for _, tokens, _ in turns.first[1:]]
    assert ran == [r.prefix for r in asked[1:]], "the answer's KV is kept, as a prefix cache keeps it"
    assert [encodes for *_, encodes in turns.first[2:4]] == [1, 1], "encodings are kept"


@pytest.mark.slow
def test_both_tables_are_written(tmp_path, capsys):
    where = tmp_path / "agents.json"
    given = ["--turns", "4", "--pictures", "1", "--tokens", "16", "--layers", "1", "--agents", "AutoGLM"]
    assert main(["agents", *given, "--output", str(where)]) == 0
    (row,) = json.loads(where.read_text())["rows"]
    assert set(row["ways"]) == set(WAYS) and row["prefix cache"] >= row["new"] > 4 * 16
    assert main(["chats", "--turns", "2"]) == 0
    out = capsys.readouterr().out
    assert "AutoGLM | 1 | 16" in out and "pictures, appended | default" in out


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [False, True])
def test_over_http_a_conversation_is_one_session_and_without_its_owner_it_is_not(
    tmp_path, capsys, monkeypatch, sabotage
):
    monkeypatch.setattr(Tails, "give", Tails.give)  # the sabotage ends with the test
    where = tmp_path / "http.json"
    given = ["--turns", "6", "--requests", "12", "--tokens", "16", "--layers", "1", "--ways", "amortize"]
    assert main(["http", *given, *(["--sabotage"] if sabotage else []), "--output", str(where)]) == 0
    named, unnamed, alone, _ = json.loads(where.read_text())["runs"]
    assert all(row["sessions"] == 1 for row in named["rows"])
    rows = {row["agent"]: row for row in unnamed["rows"]}
    if sabotage:
        assert rows["UI-TARS"]["sessions"] > 1 and rows["UI-TARS"]["written again"] > 0
        return
    assert all(row["sessions"] == 1 for row in rows.values())
    assert all(row["before the first token"] <= row["prefix cache"] for row in rows.values())
    (hermes,) = alone["rows"]
    assert hermes["written again by a prefix cache"] > 100 > 20 * hermes["written again"]
    assert "hermes-agent | amortize | no" in capsys.readouterr().out


def test_a_table_that_is_none_is_refused(capsys):
    assert main(["agent"]) == 2
    assert "chats | agents | http" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_anticipated_and_amortized_turns_run_what_the_conversation_adds(name, backbone):
    """Behind the first departure, which shows the client's rule; texts without pictures come in between."""
    agent = dataclasses.replace(NAMED[name], batch=min(NAMED[name].batch, 3))
    conversations = Conversations(backbone.processor)
    asked = list(requests(backbone, conversations, Session(agent, 2, 16, 17, 4)))
    first = next(i for i, r in enumerate(asked) if r.prefix > r.new)
    assert sum(r.prefix > r.new for r in asked[first + 1 :]) >= 2
    for way, begins in (("anticipated", first + 1), ("amortize", 1)):
        turns = run(backbone, asked, WAYS[way])
        over = [t - r.new for r, (_, t, _) in zip(asked[begins:], turns.first[begins:], strict=True)]
        assert max(over) <= 0, way
