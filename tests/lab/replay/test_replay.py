"""Replayed sessions count what caches rewrite, and the exact mode diverges nowhere."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from kamera import Backbone, testbed
from kamera.content import Conversations, media_items
from kamera.edits import edited
from lab.replay.arms import _prefix, replay
from lab.replay.exact import divergences
from lab.replay.scripts import AGENTS
from lab.replay.styles import STYLES, styled


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone(*testbed.load())


def _agent(name: str):
    return next(a for a in AGENTS if a.name == name)


def test_forty_images_of_which_three_stay_are_37_rewrites(backbone):
    agent, conversations = _agent("cua"), Conversations(backbone.processor)
    turns = list(agent.script(random.Random(0), 40))
    prompts = [conversations.render(edited(agent.rule, m, i)) for i, m in enumerate(turns)]
    cost = _prefix(prompts)
    # from the fourth turn on a picture leaves each turn, and two that stay stand behind it
    assert cost.rewrites == 37 and cost.rewritten > cost.prefilled // 2


def test_amortize_rewrites_nothing_and_encodes_once(backbone):
    costs = replay(backbone, _agent("cua"), 6, 0)
    assert costs["Kamera amortize"]["rewritten"] == costs["Kamera amortize"]["rewrites"] == 0
    assert costs["prefix cache"]["rewritten"] > 0 and costs["prefix cache"]["encodes"] > 6
    assert {costs[f"Kamera {m}"]["encodes"] for m in ("exact", "repair", "amortize")} == {6}
    assert costs["Kamera amortize"]["prefilled"] < costs["prefix cache"]["prefilled"]


def test_scripts_are_the_same_for_one_seed(backbone):
    conversations = Conversations(backbone.processor)
    for agent in AGENTS:
        one, two = (conversations.render(list(agent.script(random.Random(3), 3))[-1]) for _ in range(2))
        assert one.segment_ids() == two.segment_ids()


def test_an_agent_that_keeps_all_costs_a_prefix_cache_no_rewrite(backbone):
    costs = replay(backbone, replace(_agent("Anthropic demo"), name="keep"), 3, 0)
    assert {arm: c["rewritten"] for arm, c in costs.items()} == dict.fromkeys(costs, 0)


def test_random_turns_of_the_exact_mode_do_not_diverge():
    told = []
    found = divergences(["gqa"], 10, 1, 600.0, tell=told.append)
    assert found["turns"] == 10 and found["divergences"] == 0 and found["worst"] <= 1e-4
    assert told[-1] == found


@pytest.mark.parametrize("style", STYLES)
def test_each_template_style_renders_a_session_s_messages(backbone, style):
    processor = copy.copy(backbone.processor)
    processor.chat_template = styled(processor, style)
    for agent in AGENTS:
        messages = list(agent.script(random.Random(0), 3))[-1]
        rendered = Conversations(processor).render(messages)
        pictures = sum(s.media is not None for s in rendered.segments)
        assert pictures == len(media_items(messages))
