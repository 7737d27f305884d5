"""What is served of agents' traces, by pattern and tier: tokens found are not tokens that may be reused.

    python -m lab.reuse.traces [--requests 6] [--output FILE]

The prompts of `lab.agent_traces` go through a `Reuser` one after another, on a tiny random model: the tier of
a segment depends on its left context alone, not on weights. Left out is the pattern with pictures, whose
pixels a trace lacks. ``found behind it`` are the tokens that the index finds behind the exact prefix.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.reuse import RULES, ContentIndex, Observer, Prompt, Reuser, Scope
from lab.agent_traces import PATTERNS
from lab.recovery import prompts_of
from lab.reuse.ttft import LAYERS, VOCABULARY, model
from lab.speed.machine import commit, machine

POLICY = ReusePolicy(rank=4, certified=False)


def folded(prompt: Prompt) -> Prompt:
    """The prompt with its word ids folded into the model's vocabulary: equal words stay equal."""
    ids = prompt.ids.astype(np.int64) % (VOCABULARY - 3) + 3
    return Prompt.of(ids, anchors=prompt.anchors, spans=prompt.spans)


def measure(backbone: Backbone, pattern: str, requests: int, seed: int) -> dict[str, Any]:
    """Shares of all prompt tokens: kept in the prefix, by tier behind it, and found by the index."""
    reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICY, held=4)
    observer = Observer(ContentIndex(Scope("", ""), RULES["anchors"]), sink=reuser.sink)
    tokens: Counter[str] = Counter()
    for given in prompts_of(pattern, seed, requests):
        prompt = folded(given)
        counted = observer.observe(prompt)
        plan = reuser.prepare(prompt)
        done = plan.run()
        tokens["all"] += len(prompt)
        tokens["exact prefix"] += counted.prefix
        tokens["found behind it"] += counted.recovered
        tokens["kept"] += plan.prefix
        tokens["question"] += len(plan.question)
        for admission in done.admissions:
            if admission.start >= plan.prefix:
                tokens[admission.tier] += admission.tokens
    total = tokens.pop("all")
    return {"pattern": pattern, "tokens": total, **{name: count / total for name, count in tokens.items()}}


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.traces")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    backbone = model(LAYERS // 4)
    rows = []
    for pattern in (name for name in PATTERNS if name != "screens"):
        rows.append(measure(backbone, pattern, asked.requests, asked.seed))
        cells = (f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in rows[-1].items())
        print("  ".join(cells), flush=True)
    if asked.output is not None:
        command = f"python -m lab.reuse.traces --requests {asked.requests} --seed {asked.seed}"
        document = {"command": command, "commit": commit(), "machine": machine(), "rows": rows}
        asked.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
