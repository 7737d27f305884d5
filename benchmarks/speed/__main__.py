"""How fast, against what, on this machine: arms take turns, figures are medians with the middle half.

* ``apply``: a stored chunk into its slot, against a forward over its tokens and a plain copy.
* ``window``: each operation of a window, against a forward over all of its tokens.
* ``serve``: the first token behind a window that has just changed, against prefills and a prefix cache.
* ``answers``: answers on real weights (SmolLM2), one alone and eight at once, against ``generate``.
* ``guard``: small forms of all three; 1 if a ratio fell below the committed one's bound (guard.json).

Models are full size in shape and random in weights; ``--layers`` cuts their depth (0: all layers).

    python -m benchmarks.speed apply --preset qwen2.5-vl-7b --lengths 256 2048 --layers 2
    python -m benchmarks.speed guard [--update]
    python -m benchmarks.speed answers --rounds 9 --seconds 120
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from benchmarks import report
from benchmarks.shapes import PRESETS
from benchmarks.speed import guard
from benchmarks.speed.answers import answers
from benchmarks.speed.measured import Settings, apply, serve, window

WHAT = {"apply": apply, "window": window, "serve": serve}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    default = Settings()
    parser = report.parser("speed", __doc__)
    parser.add_argument("what", choices=[*WHAT, "answers", "guard"])
    parser.add_argument("--preset", choices=PRESETS, default=default.preset)
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--lengths", type=int, nargs="+", default=default.lengths, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=default.chunks, help="of a window")
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--seconds", type=float, default=default.seconds, help="aim of one line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--update", action="store_true", help="guard: write what was measured")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.what == "guard":
        rows, fallen = guard.run(options.update)
        report.tell(options, "Ratios against the committed ones", rows)
        return int(fallen)
    if options.what == "answers":
        rows = list(answers("smollm2", (1, 8), options.rounds, options.seconds))
        report.tell(options, "Answers of SmolLM2 in float32, over transformers", rows)
        return 0
    settings = Settings(
        options.preset,
        options.layers or None,
        tuple(options.lengths),
        options.chunks,
        options.device,
        options.dtype,
        options.rounds,
        options.seconds,
    )
    rows = list(WHAT[options.what](settings))
    report.tell(options, f"{options.what}: {options.preset}, {options.layers or 'all'} layers", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
