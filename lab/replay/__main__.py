"""``python -m lab.replay``: agents' sessions under each way of caching.

``traces``: the requests of an OpenTelemetry trace. ``exact``: random turns. ``hops``: questions that cross an
edit. Times to the first token: ``python -m lab.replay.ttft``.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kamera.edits import policies
from kamera.engines.hf import HfEngine
from lab.replay.arms import replay, replay_turns
from lab.replay.exact import divergences
from lab.replay.hops import crossed, rows
from lab.replay.scripts import AGENTS
from lab.replay.traces import sessions
from lab.speed.machine import commit, machine
from lab.testbed import BACKBONES, FAMILIES, load

COLUMNS = ("prefilled", "rewritten", "rewrites", "encodes", "forwards", "agreement", "kl")


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    where = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    lines = [f"`{document['command']}`, commit {document['commit']}; {where}", ""]
    if "hops" in document:
        lines += ["| edit | arm | n | right | as no cache | as before the edit | KL to no cache |"]
        lines += ["|---" * 7 + "|", *("| " + " | ".join(map(str, r)) + " |" for r in rows(document["hops"]))]
        return "\n".join(lines)
    if "agents" not in document:
        return "\n".join([*lines, *(f"{name}: {value}" for name, value in document["results"].items())])
    lines += ["| agent | arm | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for agent, arms in document["agents"].items():
        for arm, cost in arms.items():
            lines.append(f"| {agent} | {arm} | " + " | ".join(f"{cost[c]:,}" for c in COLUMNS) + " |")
    return "\n".join(lines)


def _replayed(backbone: HfEngine, asked: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Each session's name, and its costs by arm."""
    if asked.trace is not None:
        for name, turns in sessions(asked.trace).items():
            yield name, replay_turns(backbone, turns[: asked.steps], policies.keep_all(), None)
        return
    for agent in AGENTS:
        if not asked.only or agent.name in asked.only:
            yield agent.name, replay(backbone, agent, asked.steps, asked.seed)


def _shown(document: dict[str, Any], form: str) -> str:
    return (json.dumps(document, indent=1) if form == "json" else table(document)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a turn diverged."""
    parser = argparse.ArgumentParser(prog="python -m lab.replay", description=__doc__)
    parser.add_argument("name", nargs="?", choices=("agents", "traces", "exact", "hops"), default="agents")
    parser.add_argument(
        "--trace", type=Path, help="of traces: the file, in any form that python -m lab.reuse reads"
    )
    parser.add_argument("--family", choices=BACKBONES, default="gqa", help="the trained backbone")
    parser.add_argument("--steps", type=int, default=40, help="turns of each session, at most")
    parser.add_argument("--turns", type=int, default=10_000, help="of exact: random turns")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of exact: stop after that long")
    parser.add_argument("--items", type=int, default=48, help="of hops: questions of each edit, at least")
    parser.add_argument("--layers", type=int, help="of exact: the backbones' first decoder layers only")
    parser.add_argument("--only", nargs="*", choices=[a.name for a in AGENTS], help="agents to replay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if (asked.trace is None) == (asked.name == "traces"):
        parser.error("traces reads --trace FILE, and nothing else does")
    rest = f" exact --turns {asked.turns}"
    if asked.name == "hops":
        rest = f" hops --items {asked.items} --family {asked.family}"
    elif asked.name != "exact":
        named = f" traces --trace {asked.trace.name}" if asked.trace else ""
        rest = f"{named} --steps {asked.steps} --family {asked.family}"
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
    elif asked.name == "hops":
        document["hops"] = crossed(HfEngine(*load(asked.family)), asked.family, asked.items, asked.seed)
    else:
        backbone = HfEngine(*load(asked.family))
        document["agents"] = dict(_replayed(backbone, asked))
    text = _shown(document, asked.format)
    if asked.output is None:
        print(text, end="")
    else:
        asked.output.write_text(text, encoding="utf-8")
    return 1 if document.get("results", {}).get("divergences") else 0


if __name__ == "__main__":
    sys.exit(main())
