"""``python -m lab.walks``: operations, turns, plans and memory under the default policy, at 28 layers.

Operations and turns run on a Qwen2.5-VL of thin layers and random weights, over a store in a folder, after
the same ones have warmed what is cached. Counted are frames of `kamera` alone, in the calling thread: each
call (a generator's every resumption, too), the files they are in, and how many of them stand on the stack at
once; writes of the store, syncs and forwards in any thread. None of that is a time: the tables are the same
on every machine but for a few looks at folders. Plans are timed. Memory is that of a window of pictures, as a
share of a plain cache of its tokens.

    python -m lab.walks [--layers 28] [--turns 10] [--slots 64] [--memory 10000]
                        [--format json] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kamera import ReusePolicy
from kamera.engines.hf import HfEngine
from lab.replay.shapes import thin
from lab.results import keep
from lab.speed.machine import commit, machine
from lab.walks.memory import shares
from lab.walks.operations import Walk, returns, survivals, walks
from lab.walks.plans import plans
from lab.walks.turns import CONVERSATIONS, Turn, growth, turns


def operations(backbone: HfEngine) -> list[Walk]:
    """The walks of a warm process."""
    found = list[Walk]()
    default = ReusePolicy(certified=True)
    for each, policy in ((walks, default), (returns, default), (survivals, ReusePolicy.streaming())):
        with tempfile.TemporaryDirectory() as folder:
            for _ in each(backbone, Path(folder) / "warm", 1, policy):
                pass
            found += each(backbone, Path(folder) / "measured", 0, policy)
    return found


def conversations(backbone: HfEngine, count: int) -> dict[str, list[Turn]]:
    """The turns of each conversation, which has run once before."""
    found = {}
    for name, (rule, _, pictures) in CONVERSATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            turns(backbone, Path(folder) / "warm", rule, count, pictures)
            found[name] = turns(backbone, Path(folder) / "measured", rule, count, pictures)
    return found


def table(found: Sequence[Walk]) -> str:
    """Operations, for people and for a page."""
    lines = ["| operation | calls | files | depth | forwards |", "|---|---|---|---|---|"]
    lines += [f"| {w.operation} | {w.calls:,} | {w.files} | {w.depth} | {w.forwards} |" for w in found]
    return "\n".join(lines)


def pages(document: dict[str, Any]) -> str:
    """All tables. Pairs are before the first token and after it."""
    lines = [table([Walk(**row) for row in document["operations"]]), ""]
    for name, told in document["conversations"].items():
        over = ", ".join(f"{share} x {turn}" for turn, share in told["calls of the last turn"].items())
        lines += [f"{name}: the last turn calls {over}", ""]
        lines += ["| turn | calls | plans | puts | syncs | forwards | tokens |", "|---" * 7 + "|"]
        for number, turn in enumerate(told["turns"], 1):
            pairs = (" + ".join(map(str, turn[k])) for k in ("puts", "syncs", "forwards", "tokens"))
            lines.append(f"| {number} | {turn['calls']:,} | {turn['plans']} | " + " | ".join(pairs) + " |")
        lines.append("")
    lines += [f"| plan of {document['slots']} slots | median, ms | largest, ms |", "|---|---|---|"]
    lines += [f"| {p['request']} | {p['median ms']} | {p['largest ms']} |" for p in document["plans"]]
    lines += ["", "| memory | tokens | live cache | copies | encodings |", "|---" * 5 + "|"]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in document["memory"]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m lab.walks", description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--slots", type=int, default=64, help="of the window whose plans are timed")
    parser.add_argument(
        "--memory", type=int, default=10_000, help="tokens of the window whose memory is told"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write JSON there, too")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backbone = thin(asked.layers, "own")
    document = {
        "command": f"python -m lab.walks --layers {asked.layers} --turns {asked.turns} --slots {asked.slots} "
        f"--memory {asked.memory}",
        "commit": commit(),
        "machine": machine(),
        "operations": [asdict(w) for w in operations(backbone)],
        "conversations": {
            name: {
                "calls of the last turn": growth(found, CONVERSATIONS[name][1]),
                "turns": [asdict(turn) for turn in found],
            }
            for name, found in conversations(backbone, asked.turns).items()
        },
        "slots": asked.slots,
        "plans": [
            {"request": n, "median ms": m, "largest ms": w} for n, m, w in plans(backbone, asked.slots)
        ],
        "memory": [asdict(share) for share in shares(backbone, asked.memory)],
    }
    if asked.output is not None:
        keep(document, asked.output)
    print(json.dumps(document, indent=1) if asked.format == "json" else pages(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
