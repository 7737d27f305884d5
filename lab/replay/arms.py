"""What each way of caching does for one session: counted on the tokens, or on the model where it runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.certify import kl
from kamera.content import Conversations, Message, Rendered
from kamera.edits import EditPolicy, apply_policy, difference
from kamera.engines.hf import HfEngine
from lab.replay.counted import Cost, counted, imc, nothing, prefix, spc
from lab.replay.scripts import Agent

MODES = {"Kamera exact": "forget", "Kamera repair": "repair", "Kamera amortize": "amortize"}
COUNTED = {"no cache": nothing, "prefix cache": prefix, "SPC": spc, "SPC + IMC": imc}

Turns = Sequence[Sequence[Message]]


def replay(backbone: HfEngine, agent: Agent, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """The costs of one agent's session, by arm."""
    turns = list(agent.script(random.Random(seed), steps))
    return replay_turns(backbone, turns, agent.rule, agent.batched)


def replay_turns(
    backbone: HfEngine, turns: Turns, rule: EditPolicy, batched: EditPolicy | None
) -> dict[str, dict[str, Any]]:
    """The costs of a session's requests, by arm; ``batched`` is the same rule as a prefix cache wants it."""
    conversations = Conversations(backbone.processor)
    shaped = [apply_policy(rule, m, i) for i, m in enumerate(turns)]
    ruled = [conversations.render(m) for m in shaped]
    wanted = [backbone.plain.logits(conversations.whole(m)).float() for m in shaped]
    costs = {name: counted(ruled, reuse) for name, reuse in COUNTED.items()}
    if batched is not None:
        late = [conversations.render(apply_policy(batched, m, i)) for i, m in enumerate(turns)]
        costs["prefix cache, batched"] = counted(late, prefix)
    for name, mode in MODES.items():
        costs[name] = _kamera(backbone, rule, turns, mode, wanted)
    return {name: asdict(cost) for name, cost in costs.items()}


def _kamera(
    backbone: HfEngine, rule: EditPolicy, turns: Turns, mode: Any, wanted: Sequence[torch.Tensor]
) -> Cost:
    """A session, run. What is prefilled beyond what is new stood behind an edit."""
    cost = Cost()
    exact = mode == "forget"
    policy = ReusePolicy(
        minimum="exact" if exact else "patched",
        on_miss="form" if mode == "repair" else "prefill",
        certified=False,
    )
    session = ChatSession(backbone, ChunkStore.open("memory://"), mode=mode, policy=policy, edit_policy=rule)
    before: Rendered | None = None
    same, apart = [], []
    for history, reference in zip(turns, wanted, strict=True):
        report = session.send(history, max_new_tokens=1, do_sample=False).report
        layout = session.state.layout
        assert layout is not None
        prompt = layout.prompt
        alone = prompt.num_tokens - prompt.stable  # the generation prompt is the answer's, not the report's
        again = 0
        if before is not None:
            inserted = sum(prompt.segments[j].num_tokens for j in difference(before, prompt).inserted)
            again = max(0, report.prefilled - (prompt.num_tokens - prompt.stable) - inserted)
        cost.add(report.tokens_recomputed + alone, again, report.vision_encodes, report.forwards + 1)
        said = session.next_token_logits(history).float()
        same.append(bool(said.argmax() == reference.argmax()))
        apart.append(kl(said, reference))
        before = prompt
    return replace(cost, agreement=round(sum(same) / len(same), 4), kl=round(sum(apart) / len(apart), 5))
