"""What every cut rule recovers of the made-up agents' traces, by pattern.

python -m lab.recovery [--seeds 3] [--requests 40] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from kamera.reuse import RULES, ContentIndex, Prompt
from lab.agent_traces import PATTERNS, trace
from lab.results import keep
from lab.reuse.otel import read_calls
from lab.reuse.recovery import Recovery, recovery
from lab.reuse.render import render
from lab.reuse.words import word_ids
from lab.speed.machine import commit, machine


def prompts_of(pattern: str, seed: int, requests: int) -> list[Prompt]:
    """The pattern's requests, by way of the trace format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps(trace(seed, requests, (pattern,))), encoding="utf-8")
        return [render(call, word_ids) for call in read_calls(path).calls]


def measure(seeds: int, requests: int) -> list[dict[str, Any]]:
    """Rows of pattern and rule: tokens, and the shares of exact prefix, recovered and novel ones."""
    rows = []
    for pattern in PATTERNS:
        counted = dict.fromkeys(RULES, Recovery())
        for seed in range(seeds):
            prompts = prompts_of(pattern, seed, requests)
            for name, rule in RULES.items():
                counted[name] += recovery(ContentIndex(rule), prompts)
        for name, found in counted.items():
            shares = {k: getattr(found, k) / found.tokens for k in ("prefix", "recovered", "novel")}
            rows.append({"pattern": pattern, "rule": name, "tokens": found.tokens, **shares})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.recovery")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = measure(asked.seeds, asked.requests)
    for row in rows:
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if asked.output:
        command = f"python -m lab.recovery --seeds {asked.seeds} --requests {asked.requests}"
        document = {"command": command, "commit": commit(), "machine": machine(), "rows": rows}
        keep(document, asked.output)


if __name__ == "__main__":
    main()
