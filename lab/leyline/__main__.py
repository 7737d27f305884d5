"""``python -m lab.leyline``: what the answer follows after an edit of its prompt.

``single``: one prompt in which a frame that others were bound to becomes a stub. ``random``: random edits of
both signs. ``long``: a trajectory of 50 turns with up to 8 edits each.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kamera.engines.hf import HfEngine
from lab.leyline.single import single
from lab.leyline.suites import random_edits, trajectory
from lab.speed.machine import commit, machine
from lab.testbed import BACKBONES, load

MOST = 8
"""Edits of one turn of a trajectory."""
COLUMNS = (
    "n",
    "of these, as full",
    "of these, as re-prefill",
    "of these, as neither",
    "KL to full",
    "KL to re-prefill",
)


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown."""
    lines = [f"`{document['command']}`, commit {document['commit']}", ""]
    lines += ["| backbone | arm | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for name, found in document["results"].items():
        for arm, said in found["arms"].items():
            lines.append(f"| {name} | {arm} | " + " | ".join(str(said[c]) for c in COLUMNS) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.leyline", description=__doc__)
    parser.add_argument("name", choices=("single", "random", "long"))
    parser.add_argument("--families", nargs="*", choices=BACKBONES, default=list(BACKBONES))
    parser.add_argument("--items", type=int, default=200, help="questions of each backbone (of long: turns)")
    parser.add_argument(
        "--before", action="store_true", help="single: the question stands in the edited prompt"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    command = (
        f"python -m lab.leyline {asked.name} --families {' '.join(asked.families)} --items {asked.items}"
    )
    command += f"{' --before' if asked.before else ''} --seed {asked.seed}"
    document: dict[str, Any] = {"command": command, "commit": commit(), "machine": machine(), "results": {}}
    for family in asked.families:
        backbone = HfEngine(*load(family))
        if asked.name == "single":
            found = single(backbone, family, asked.items, asked.seed, before=asked.before)
        elif asked.name == "random":
            found = random_edits(backbone, family, asked.items, asked.seed)
        else:
            found = trajectory(backbone, family, asked.items, MOST, asked.seed)
        document["results"][family] = found
    text = json.dumps(document, indent=1) if asked.format == "json" else table(document)
    if asked.output is None:
        print(text)
    else:
        asked.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
