"""Do the questions by which a patch proves itself see what real questions see?

    python -m lab.proofs [--family gqa mla …] [--episodes 12] [--dtype float32] [--tolerance 0.05]
                         [--format table|json] [--output FILE]

One window an episode: three antecedents, one items frame. Per arm the share of windows in which its KV proves
itself, the proof's KL and flips, and what the multi-hop questions of the world, which no proof has seen, lose
behind the same KV. Arms marked SABOTAGE must not prove themselves unless those questions lose nothing either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import ReusePolicy
from kamera.engines.hf import HfEngine
from lab.proofs.measure import Row, rows
from lab.speed.machine import commit, machine
from lab.testbed import BACKBONES, load

LOST = 0.05


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """By arm; ``missed`` counts windows that proved themselves while real questions lost over 0.05 nats.

    ``narrow`` are those of a model without a tokenizer that is asked four one-hop questions of one kind,
    ``answered`` those that answers alone would have proved.
    """
    arms = {}
    for arm in dict.fromkeys(row.arm for row in found):
        of = [row for row in found if row.arm == arm]
        n = sum(row.n for row in of)
        arms[arm] = {
            "windows": len(of),
            "proved": sum(row.proved for row in of),
            "missed": sum(row.proved and row.lost > LOST for row in of),
            "proof kl": float(np.median([row.kl for row in of])),
            "proof kl, largest": max(row.kl for row in of),
            "flips": sum(row.flips for row in of),
            "kv": float(np.median([row.kv for row in of])),
            "kv, least": min(row.kv for row in of),
            "kv, largest": max(row.kv for row in of),
            "answered": sum(row.answered for row in of),
            "narrow": sum(row.narrow for row in of),
            "narrow, missed": sum(row.narrow and row.lost > LOST for row in of),
            "narrow, answered": sum(row.narrow_answered for row in of),
            "narrow, answered, missed": sum(row.narrow_answered and row.lost > LOST for row in of),
            "questions": n,
            "kl": sum(row.lost * row.n for row in of) / n,
            "kl, largest": max(row.worst for row in of),
            "right": sum(row.right for row in of) / n,
            "bytes": float(np.mean([row.bytes for row in of])),
        }
    return arms


def table(family: str, arms: dict[str, Any]) -> str:
    """An arm a line."""
    head = "proved  narrow  proof kl (largest)  flips      kv | questions: kl  (largest)   right  KiB"
    lines = [f"{family:32}{head}"]
    for name, a in arms.items():
        proved = f"{a['proved']:3}/{a['windows']:2}  {a['narrow']:3}/{a['windows']:2}"
        proof = f"{a['proof kl']:8.4f} ({a['proof kl, largest']:8.4f}) {a['flips']:5}  {a['kv']:6.3f}"
        asked = f"{a['kl']:12.4f} ({a['kl, largest']:8.4f})  {a['right']:.3f}"
        lines.append(f"{name:32}{proved}  {proof}  | {asked} {a['bytes'] / 1024:6.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=BACKBONES, default=["gqa", "mla"])
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tolerance", type=float, default=ReusePolicy.tolerance)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python -m lab.proofs --family " + " ".join(args.family) + f" --episodes {args.episodes}"
        f" --dtype {args.dtype} --tolerance {args.tolerance}",
        "commit": commit(),
        "machine": machine(),
        "families": {},
    }
    text = []
    for family in args.family:
        backbone = HfEngine(*load(family, dtype=getattr(torch, args.dtype)))
        found = list(rows(backbone, args.episodes, args.tolerance))
        arms = summary(found)
        report["families"][family] = {"arms": arms, "rows": [asdict(row) for row in found]}
        text.append(table(family, arms))
        if args.format == "table":
            print(text[-1], flush=True)
    if args.format == "json":
        text = [json.dumps(report, indent=1)]
        print(text[0])
    if args.output is not None:
        args.output.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
