"""Replayed sessions count what caches rewrite, and the exact mode diverges nowhere."""

from __future__ import annotations

import copy
import json
import random

import pytest

from kamera import testbed
from kamera.content import Conversations, media_items
from kamera.edits import apply_policy, policies
from kamera.engines.hf import HfEngine
from lab.replay.arms import replay, replay_turns
from lab.replay.counted import counted, imc, prefix, spc
from lab.replay.exact import divergences
from lab.replay.scripts import AGENTS, picture_of, spoken
from lab.replay.styles import STYLES, styled
from lab.replay.traces import sessions


@pytest.fixture(scope="module")
def backbone() -> HfEngine:
    return HfEngine(*testbed.load())


def _agent(name: str):
    return next(a for a in AGENTS if a.name == name)


@pytest.mark.slow
def test_forty_images_of_which_three_stay_are_37_rewrites(backbone):
    agent, conversations = _agent("cua"), Conversations(backbone.processor)
    turns = list(agent.script(random.Random(0), 40))
    prompts = [conversations.render(apply_policy(agent.rule, m, i)) for i, m in enumerate(turns)]
    cost = counted(prompts, prefix)
    # from the fourth turn on a picture leaves each turn, and two that stay stand behind it
    assert cost.rewrites == 37 and cost.rewritten > cost.prefilled // 2


@pytest.mark.slow
def test_amortize_rewrites_nothing_and_encodes_once(backbone):
    costs = replay(backbone, _agent("cua"), 5, 0)
    assert costs["Kamera exact"]["agreement"] == 1.0 and costs["Kamera exact"]["kl"] < 1e-4
    assert costs["Kamera amortize"]["kl"] > costs["Kamera repair"]["kl"]
    assert costs["Kamera amortize"]["rewritten"] == costs["Kamera amortize"]["rewrites"] == 0
    assert costs["prefix cache"]["rewritten"] > 0 and costs["prefix cache"]["encodes"] > 5
    assert {costs[f"Kamera {m}"]["encodes"] for m in ("exact", "repair", "amortize")} == {5}
    assert costs["Kamera amortize"]["prefilled"] < costs["prefix cache"]["prefilled"]


@pytest.mark.slow
def test_kronk_rebuilds_for_each_picture_and_appends_texts(backbone):
    conversations = Conversations(backbone.processor)
    system = {"role": "system", "content": "You use a computer. " + "Look well at it. " * 20}
    grown = [system, *({"role": "user", "content": f"Step {i}."} for i in range(3))]
    shown = [system, *(_shot(random.Random(i)) for i in range(3))]
    first = conversations.render(grown[:1]).stable
    for turns, encodes in ((grown, 0), (shown, 6)):
        prompts = [conversations.render(turns[: i + 2]) for i in range(3)]
        costs = {kept.__name__: counted(prompts, kept) for kept in (prefix, spc, imc)}
        total = sum(p.num_tokens for p in prompts)
        assert costs["spc"].prefilled == total - 2 * first
        assert costs["imc"].encodes == encodes
        assert costs["imc"].prefilled == costs["spc" if encodes else "prefix"].prefilled


def _shot(draw):
    return {"role": "user", "content": [{"type": "image", "image": picture_of(draw)}]}


def test_a_trace_s_requests_are_replayed_as_they_were_sent(backbone, tmp_path):
    def span(*messages, conversation="a"):
        said = [{"role": r, "parts": [{"type": "text", "content": c}]} for r, c in messages]
        blob = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "aGk="}
        said.append({"role": "user", "parts": [blob]})
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": said}
        return {"attributes": attributes | {"gen_ai.conversation.id": conversation}}

    system = ("system", "You mend code. " * 30)
    spans = [
        span(system, ("user", "mend it")),
        span(system, ("user", "mend it"), ("tool", "Error: no")),
        span(system, ("user", "mend it"), ("user", "again")),
        span(system, conversation="b"),
    ]
    (tmp_path / "trace.json").write_text(json.dumps(spans))
    found = sessions(tmp_path / "trace.json")
    assert [len(turns) for turns in found.values()] == [3, 1]
    costs = replay_turns(backbone, found["a"], policies.keep_all(), None)
    assert costs["no cache"]["encodes"] == 3 and costs["Kamera exact"]["encodes"] == 1
    assert costs["Kamera exact"]["agreement"] == 1.0
    assert costs["Kamera amortize"]["prefilled"] < costs["SPC + IMC"]["prefilled"]


def _last(agent, seed: int) -> list:
    """The history of a third step, its calls as text."""
    return spoken(policies.keep_all())(list(agent.script(random.Random(seed), 3))[-1], 2)


def test_scripts_are_the_same_for_one_seed(backbone):
    conversations = Conversations(backbone.processor)
    for agent in AGENTS:
        one, two = (conversations.render(_last(agent, 3)) for _ in range(2))
        assert one.segment_ids() == two.segment_ids()


def test_an_agent_that_keeps_all_costs_a_prefix_cache_no_rewrite(backbone):
    costs = replay(backbone, _agent("Anthropic demo"), 3, 0)
    costs = {arm: cost for arm, cost in costs.items() if "SPC" not in arm}  # they keep no picture
    assert {arm: c["rewritten"] for arm, c in costs.items()} == dict.fromkeys(costs, 0)


def test_random_turns_of_the_exact_mode_do_not_diverge():
    told = []
    found = divergences(["gqa"], 6, 1, 600.0, tell=told.append)
    assert found["turns"] == 6 and found["divergences"] == 0 and found["worst"] <= 1e-4
    assert told[-1] == found


@pytest.mark.parametrize("style", STYLES)
def test_each_template_style_renders_a_session_s_messages(backbone, style):
    processor = copy.copy(backbone.processor)
    processor.chat_template = styled(processor, style)
    for agent in AGENTS:
        messages = _last(agent, 0)
        rendered = Conversations(processor).render(messages)
        pictures = sum(s.media is not None for s in rendered.segments)
        assert pictures == len(media_items(messages))
