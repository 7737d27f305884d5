"""The server under many clients, and under agents that edit their own histories.

* ``load``: conversations of three turns on the shipped backbone; times, and answers other than those that one
  client gets alone.
* ``clients``: the six agents of ``benchmarks.price agents`` over ``/v1/chat/completions``, with a session's
  id and without; tokens before the first token beside a prefix cache.
* ``edits``: clients that edit their histories in ten ways; tokens before the first token beside a prefix
  cache that knows pictures, and answers other than those of plain transformers.
* ``headers``: agents with a header each in front of the same rules, and a clock in a system prompt, in a pool
  and on ``kamera serve --reuse``; tokens before the first token beside a prefix cache.
* ``soak``: sixteen clients who hang up, undo and reword, and a server that is killed twice; answers other
  than plain transformers', turns that are lost, and memory.
* ``peers``: two text agents on SmolLM2, on ``kamera serve`` and on other servers, each of which needs a
  Python of an environment of its own: one with ``xllamacpp``, one with vLLM.

    python -m benchmarks.serve load [--clients 1 4 16] [--requests 48]
    python -m benchmarks.serve clients [--turns 20]
    python -m benchmarks.serve edits [--requests 48]
    python -m benchmarks.serve headers
    python -m benchmarks.serve soak [--requests 500]
    python -m benchmarks.serve peers [--llamacpp PYTHON] [--vllm PYTHON] [--turns 20]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from benchmarks import report
from benchmarks.serve import clients, edits, headers, load, peers, soak

WHAT = {
    "load": load.rows,
    "clients": clients.rows,
    "edits": edits.rows,
    "headers": headers.rows,
    "peers": peers.rows,
    "soak": soak.rows,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("serve", __doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="of load, at once")
    parser.add_argument("--requests", type=int, default=48, help="of load, edits and soak")
    parser.add_argument("--at-once", type=int, default=16, help="requests that the server runs at once")
    parser.add_argument("--rounds", type=int, default=2, help="of load")
    parser.add_argument("--turns", type=int, default=20, help="of each agent")
    parser.add_argument("--side", type=int, default=64, help="pixels of an agent's picture")
    parser.add_argument("--layers", type=int, default=2, help="of the agents' model")
    parser.add_argument("--llamacpp", metavar="PYTHON", help="of peers: it has xllamacpp")
    parser.add_argument("--reuse", type=int, nargs="+", default=[16, 0], help="of peers: n_cache_reuse")
    parser.add_argument("--vllm", metavar="PYTHON", help="of peers: it has vLLM")
    parser.add_argument("--modes", nargs="*", default=["auto", "amortize"], help="of peers: Kamera's")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report.tell(options, f"A server: {options.what}", list(WHAT[options.what](options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
