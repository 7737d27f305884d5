"""What is served of agents' traces, by pattern and tier: tokens found are not tokens that may be reused.

    python -m lab.reuse.traces [--requests 6] [--policies strict sampled] [--patterns tools …]
                               [--output FILE]

The prompts of `lab.agent_traces` go through a `Reuser` one after another, on a tiny random model: the tier of
a segment depends on its left context alone, not on weights. ``heads`` are the first tokens of prefilled
segments whose KV is taken from the segment that stood there, ``found behind it`` the tokens that the index
finds behind the exact prefix. ``served`` is all that is not prefilled, ``of what comes again`` its share of
prefix and found tokens. Under ``strict`` the policy is POLICY: patches of the same left context. Under
``sampled`` a quarter of each moved segment's tokens is run. A trace lacks pixels, so the pattern with
pictures is another one, with real ones: ``screens`` are conversations of a computer-use agent
(`lab.replay.scripts`) that keeps its last three screenshots, through the shipped vision backbone and its
processor, strict; its encodes are counted too.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import ChunkStore, ReusePolicy, testbed
from kamera.content import Conversations, Message
from kamera.edits import policies
from kamera.engines.hf import HfEngine
from kamera.reuse import DEFAULT_RULE, RULES, ContentIndex, Media, Prompt, Reuser
from lab.agent_traces import PATTERNS
from lab.recovery import prompts_of
from lab.replay.scripts import screens
from lab.results import keep
from lab.reuse.recovery import Observer
from lab.reuse.ttft import LAYERS, VOCABULARY, model
from lab.speed.machine import commit, machine

POLICY = ReusePolicy(rank=4, certified=False, forms="always")
SAMPLED = replace(POLICY, minimum="sampled", share=0.25, max_error=1.0, forms="returning")
"""A quarter of each segment's tokens: on random weights the estimate would refuse them."""
POLICIES = {"strict": POLICY, "sampled": SAMPLED}

KEEP = policies.keep_last_images(3)


def folded(prompt: Prompt) -> Prompt:
    """The prompt with its word ids folded into the model's vocabulary: equal words stay equal."""
    ids = prompt.ids.astype(np.int64) % (VOCABULARY - 3) + 3
    return Prompt.of(ids, anchors=prompt.anchors, spans=prompt.spans)


def measure(backbone: HfEngine, pattern: str, requests: int, seed: int, name: str) -> dict[str, Any]:
    """Shares of all prompt tokens: kept in the prefix, by tier behind it, found by the index, and run."""
    reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICIES[name], held=4)
    prompts = [folded(given) for given in prompts_of(pattern, seed, requests)]
    return _served(reuser, pattern, [(prompt, prompt) for prompt in prompts])


def _served(reuser: Reuser, pattern: str, asked: Sequence[tuple[Any, Prompt]]) -> dict[str, Any]:
    """Each prompt (as given to ``reuser``, and as the index sees it) is counted, then served."""
    observer = Observer(ContentIndex(RULES[DEFAULT_RULE]), sink=reuser.sink)
    tokens: Counter[str] = Counter()
    encodes = pictures = 0
    for given, prompt in asked:
        counted = observer.observe(prompt)
        plan = reuser.prepare(given)
        done = plan.run()
        tokens["all"] += len(prompt)
        tokens["exact prefix"] += counted.prefix
        tokens["found behind it"] += counted.recovered
        tokens["kept"] += plan.prefix
        tokens["question"] += len(plan.question)
        done.window.flush()
        tokens["run before the answer"] += done.report.tokens_recomputed + len(plan.question)
        encodes += done.report.vision_encodes
        pictures += len(prompt.media)
        for admission in done.admissions:
            if admission.start >= plan.prefix:
                head = admission.head if admission.tier == "none" else 0
                tokens[admission.tier] += admission.tokens - head
                tokens["heads"] += head
    tokens["run later"] = reuser.usage().later.tokens
    total, question = tokens.pop("all"), tokens["question"]
    again = tokens["exact prefix"] + tokens["found behind it"]
    tokens["served"] = total - question - tokens["none"]
    shares = {name: count / total for name, count in tokens.items()}
    policy = next(name for name, policy in POLICIES.items() if policy == reuser.policy)
    about: dict[str, Any] = {
        "pattern": pattern,
        "policy": policy,
        "tokens": total,
        "of what comes again": tokens["served"] / again,
    }
    return {**about, **shares, "pictures": pictures, "encodes": encodes}


def measure_screens(requests: int, seed: int) -> dict[str, Any]:
    """The same shares of a computer-use agent's conversations, whose old screenshots go."""
    backbone = HfEngine(*testbed.load())
    reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICY, held=4)
    history = list(screens(random.Random(seed), requests))
    edited = [KEEP(messages, turn) for turn, messages in enumerate(history)]
    return _served(reuser, "screens", [(m, observed(backbone, m)) for m in edited])


def observed(backbone: HfEngine, messages: Sequence[Message]) -> Prompt:
    """The conversation as the index sees it: its pictures by digest, its messages as anchors."""
    whole = Conversations(backbone.processor).render(messages)
    media = [Media(s.start, s.stop, s.media) for s in whole.segments if s.media is not None]
    return Prompt.of(whole.ids.numpy(), anchors=[s.start for s in whole.segments], media=media)


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.traces")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    backbone = model(LAYERS // 4)
    rows = []
    for pattern in asked.patterns:
        if pattern == "screens":
            rows += [measure_screens(asked.requests, asked.seed)] if "strict" in asked.policies else []
        else:
            for name in asked.policies:
                rows.append(measure(backbone, pattern, asked.requests, asked.seed, name))
    for row in rows:
        print(
            "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True
        )
    if asked.output is not None:
        command = f"python -m lab.reuse.traces --requests {asked.requests} --seed {asked.seed}"
        command += "" if asked.patterns == list(PATTERNS) else f" --patterns {' '.join(asked.patterns)}"
        command += "" if asked.policies == list(POLICIES) else f" --policies {' '.join(asked.policies)}"
        document = {"command": command, "commit": commit(), "machine": machine(), "rows": rows}
        keep(document, asked.output)


if __name__ == "__main__":
    main()
