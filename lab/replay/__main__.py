"""``python -m lab.replay``: agents' sessions under each way of caching. ``exact``: random turns."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kamera import Backbone, testbed
from lab.replay.arms import replay
from lab.replay.exact import divergences
from lab.replay.scripts import AGENTS
from lab.speed.machine import commit, machine
from lab.testbed import FAMILIES

COLUMNS = ("prefilled", "rewritten", "rewrites", "encodes", "forwards")


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    where = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    lines = [f"`{document['command']}`, commit {document['commit']}; {where}", ""]
    if "agents" not in document:
        return "\n".join([*lines, *(f"{name}: {value}" for name, value in document["results"].items())])
    lines += ["| agent | arm | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for agent, arms in document["agents"].items():
        for arm, cost in arms.items():
            lines.append(f"| {agent} | {arm} | " + " | ".join(f"{cost[c]:,}" for c in COLUMNS) + " |")
    return "\n".join(lines)


def _shown(document: dict[str, Any], form: str) -> str:
    return (json.dumps(document, indent=1) if form == "json" else table(document)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a turn diverged."""
    parser = argparse.ArgumentParser(prog="python -m lab.replay", description=__doc__)
    parser.add_argument("name", nargs="?", choices=("agents", "exact"), default="agents")
    parser.add_argument("--steps", type=int, default=40, help="turns of each session")
    parser.add_argument("--turns", type=int, default=10_000, help="of exact: random turns")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of exact: stop after that long")
    parser.add_argument("--layers", type=int, help="of exact: the backbones' first decoder layers only")
    parser.add_argument("--only", nargs="*", choices=[a.name for a in AGENTS], help="agents to replay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rest = f" --steps {asked.steps}" if asked.name == "agents" else f" exact --turns {asked.turns}"
    rest += f" --layers {asked.layers}" if asked.layers else ""
    rest += f" --only {' '.join(asked.only)}" if asked.only and asked.name == "agents" else ""
    document: dict[str, Any] = {"command": f"python -m lab.replay{rest} --seed {asked.seed}"}
    document |= {"commit": commit(), "machine": machine(), "seed": asked.seed}
    if asked.name == "exact":

        def tell(found: dict[str, Any]) -> None:
            document["results"] = found
            if asked.output is not None:  # a run that is ended early leaves what it found
                asked.output.write_text(_shown(document, asked.format), encoding="utf-8")

        tell(
            divergences(
                list(FAMILIES), asked.turns, asked.seed, asked.seconds, layers=asked.layers, tell=tell
            )
        )
    else:
        backbone = Backbone(*testbed.load())
        chosen = [a for a in AGENTS if not asked.only or a.name in asked.only]
        document["agents"] = {a.name: replay(backbone, a, asked.steps, asked.seed) for a in chosen}
    text = _shown(document, asked.format)
    if asked.output is None:
        print(text, end="")
    else:
        asked.output.write_text(text, encoding="utf-8")
    return 1 if document.get("results", {}).get("divergences") else 0


if __name__ == "__main__":
    sys.exit(main())
