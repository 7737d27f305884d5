"""Tokens and forwards of chats, agents and windows, beside a prefix cache.

* ``chats``: conversations of the shipped backbone, appended to or with the last N pictures kept.
* ``agents``: six agents whose clients edit their own histories, on a model of thin layers and random weights.
* ``clients``: text agents and chats whose clients edit by rules of their own, on SmolLM2.
* ``windows``: append, slide, recall and reorder of a window of pictures.

Counted by hooks, over all threads: *first* is what ran before the first token of an answer (or before the
operation returns and a question is asked), *background* all that ran besides. A prefix cache runs one forward
over the tokens behind the longest prefix that the prompt shares with the one before it. Counts are no times:
they are the same on every machine.

    python -m benchmarks.price chats | agents | clients | windows [--turns 10] [--format json]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from benchmarks import report
from benchmarks.price import agents, chats, clients, windows

WHAT = {"chats": chats.rows, "agents": agents.rows, "clients": clients.rows, "windows": windows.rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("price", __doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--pictures", type=int, nargs="+", default=[1, 3, 5, 8], help="numbers that are kept")
    parser.add_argument("--side", type=int, default=128, help="pixels of an agent's picture: s² tokens of 8s")
    parser.add_argument("--layers", type=int, default=2, help="of the agents' model")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = list(WHAT[options.what](options))
    report.tell(options, f"Forwards and tokens of {options.what}, {options.turns} turns", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
