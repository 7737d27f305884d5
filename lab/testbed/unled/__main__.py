"""`python -m lab.testbed.unled --out DIR [--family gqa] [--seed 0] [--wider | --larger]`.

Run again, it goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..families import FAMILIES
from .schedule import Schedule, larger, wider
from .train import train


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="train a backbone on answers and captions only")
    parser.add_argument("--out", type=Path, required=True, help="folder of weights, checkpoint and log")
    parser.add_argument("--family", choices=list(FAMILIES), default="gqa")
    parser.add_argument("--seed", type=int, default=0)
    onward = parser.add_mutually_exclusive_group()
    onward.add_argument("--wider", action="store_true", help="go on from the unled backbone: see WIDER")
    onward.add_argument("--larger", action="store_true", help="go on from the unled backbone: see LARGER")
    parser.add_argument("--limit", type=int, help="stop after this many steps; run again to go on")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    schedule = wider if options.wider else larger if options.larger else Schedule
    train(options.out, schedule(options.family, options.seed), limit=options.limit)


if __name__ == "__main__":
    main()
