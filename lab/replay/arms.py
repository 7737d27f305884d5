"""What each way of caching does for one session: counted on the tokens, or on the model where it runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kamera import Backbone, ChatSession, ChunkStore, ReusePolicy
from kamera.content import Conversations, Rendered
from kamera.edits import difference, edited
from lab.replay.scripts import Agent

MODES = {"Kamera exact": "forget", "Kamera repair": "repair", "Kamera amortize": "amortize"}


@dataclass
class Cost:
    """Sums over a session.

    ``prefilled``: tokens run through the decoder for prompts. ``rewritten``: of these, tokens of the prompt
    before that stood behind an edit. ``rewrites``: turns that rewrote any. ``encodes``: vision tower runs.
    ``forwards``: decoder forwards for prompts.
    """

    prefilled: int = 0
    rewritten: int = 0
    rewrites: int = 0
    encodes: int = 0
    forwards: int = 0

    def add(self, prefilled: int, rewritten: int, encodes: int, forwards: int) -> None:
        """One turn more."""
        self.prefilled += prefilled
        self.rewritten += rewritten
        self.rewrites += rewritten > 0
        self.encodes += encodes
        self.forwards += forwards


def replay(backbone: Backbone, agent: Agent, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """The costs of one agent's session, by arm."""
    turns = list(agent.script(random.Random(seed), steps))
    conversations = Conversations(backbone.processor)
    ruled = [conversations.render(edited(agent.rule, m, i)) for i, m in enumerate(turns)]
    batched = [conversations.render(edited(agent.batched, m, i)) for i, m in enumerate(turns)]
    costs = {
        "no cache": _plain(ruled),
        "prefix cache": _prefix(ruled),
        "prefix cache, batched": _prefix(batched),
        **{name: _kamera(backbone, agent, turns, mode) for name, mode in MODES.items()},
    }
    return {name: asdict(cost) for name, cost in costs.items()}


def _plain(prompts: Sequence[Rendered]) -> Cost:
    cost = Cost()
    for prompt in prompts:
        cost.add(prompt.num_tokens, 0, sum(s.media is not None for s in prompt.segments), 1)
    return cost


def _prefix(prompts: Sequence[Rendered]) -> Cost:
    """A cache of the prompt before and nothing else: what both begin with is not prefilled again.

    Pictures in front of the first change are not encoded again. The answer is not in it, nor in Kamera's.
    """
    cost = Cost()
    before: Rendered | None = None
    for prompt in prompts:
        same = 0
        for old, new in zip(() if before is None else before.segments, prompt.segments, strict=False):
            if old.id != new.id:
                break
            same += 1
        shared = prompt.segments[same - 1].stop if same else 0
        change = None if before is None else difference(before, prompt)
        stayed = () if change is None else (*change.kept, *change.moved)
        behind = sum(prompt.segments[j].num_tokens for _, j in stayed if j >= same)
        encodes = sum(s.media is not None for s in prompt.segments[same:])
        cost.add(prompt.num_tokens - shared, behind, encodes, 1)
        before = prompt
    return cost


def _kamera(backbone: Backbone, agent: Agent, turns: Sequence[Any], mode: Any) -> Cost:
    """A session, run. What is prefilled beyond what is new stood behind an edit."""
    cost = Cost()
    exact = mode == "forget"
    policy = ReusePolicy(
        minimum="exact" if exact else "patched",
        on_miss="form" if mode == "repair" else "prefill",
        certified=False,
    )
    session = ChatSession(
        backbone, ChunkStore.open("memory://"), mode=mode, policy=policy, edit_policy=agent.rule
    )
    before: Rendered | None = None
    for history in turns:
        report = session.send(history, max_new_tokens=1, do_sample=False).report
        layout, window = session.layout, session.window
        assert layout is not None and window is not None
        prompt = layout.prompt
        # the anchor and the generation prompt are forwards of their own, outside of the report's
        alone = prompt.num_tokens - prompt.stable + (window.anchor.length if before is None else 0)
        again = 0
        if before is not None:
            inserted = sum(prompt.segments[j].num_tokens for j in difference(before, prompt).inserted)
            again = max(0, report.prefilled - (prompt.num_tokens - prompt.stable) - inserted)
        forwards = report.forwards + (2 if before is None else 1)
        cost.add(report.tokens_recomputed + alone, again, report.vision_encodes, forwards)
        before = prompt
    return cost
