"""``python -m lab.sample_cost``: kernel, choice and completion of a sample over the chunk's forward.

A text of as many tokens as a picture, on a published shape with few layers and random weights, one thread.
The figures are shares of the forward of all its tokens, by processor time, at all layers of the shape.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from kamera.content import Encoded
from kamera.ops import Design, token_kernel
from lab.paper.document import commit
from lab.replay.shapes import shaped
from lab.results import keep
from lab.speed.machine import machine


def measured(backbone: Any, tokens: int, layers: int) -> dict[str, float]:
    """Shares of one forward of ``tokens`` tokens through ``layers`` layers; a quarter of them run."""
    ids = torch.randint(1000, 2000, (tokens,), generator=torch.Generator().manual_seed(0))
    positions = backbone.positions([ids], [{}])
    started = time.process_time()
    kv = backbone.prefill([Encoded(ids, {}, {})], [positions])[0]
    forward = (time.process_time() - started) / len(backbone.layout)
    started = time.process_time()
    kernel = token_kernel(kv, backbone.layout, positions)
    compared = (time.process_time() - started) / len(backbone.layout)
    started = time.process_time()
    completion = Design.of(kernel).completion(tokens // 4, positions)
    channel, *_ = backbone.layout[0].channels
    base = kv[0][channel.name]
    completion.complete(channel, base, base[:, completion.rows])  # solves once for all layers
    chosen = time.process_time() - started
    started = time.process_time()
    for channel in backbone.layout[0].channels:
        base = kv[0][channel.name]
        completion.complete(channel, base, base[:, completion.rows])
    completed = time.process_time() - started
    return {
        "tokens": tokens,
        "kernel": compared / forward,
        "choice and solve": chosen / (forward * layers),
        "completion": completed / forward,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.sample_cost", description=__doc__)
    parser.add_argument("--preset", default="qwen2.5-vl-3b", help="a shape of lab.speed")
    parser.add_argument("--layers", type=int, default=36, help="of the whole shape; two are run")
    parser.add_argument("--tokens", type=int, nargs="+", default=[258, 1446])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = shaped(args.preset, 2, torch.float32)
    report = {
        "command": f"python -m lab.sample_cost --preset {args.preset} --layers {args.layers} --tokens "
        f"{' '.join(map(str, args.tokens))}",
        "commit": commit(),
        "machine": machine(),
        "chunks": [measured(backbone, tokens, args.layers) for tokens in args.tokens],
    }
    if args.output is not None:
        keep(report, args.output)
    print(json.dumps(report["chunks"], indent=1))


if __name__ == "__main__":
    main()
