"""Digests of everything that a fixed walk stores and answers. ``python -m lab.contents``.

The walk appends five frames of the testbed's world to a window of the shipped backbone, slides, recalls and
reorders, and asks after each step. Two commits whose output is the same store the same tensors, bit for bit,
and give the same logits; ids, keys and headers may differ. One thread, so that sums run in one order; compare
only runs of one machine.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from lab.speed.machine import commit

QUESTION = "value of tag 37?"


def digest(tensor: torch.Tensor) -> str:
    """Of dtype-blind bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def walk(folder: Path) -> dict[str, Any]:
    """Labels and logits after every step, and every stored object as digests of its tensors, in no order."""
    backbone = Backbone(*testbed.load())
    frames = testbed.World(0).episode(3, layout="LRLIL").frames
    with ChunkStore.open(folder) as store:
        policy = ReusePolicy(certified=False, forms="always")
        window = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
        first, *_ = [window.append(frame.content).slot.chunk_id for frame in frames]
        steps: dict[str, Callable[[], object]] = {
            "append": lambda: None,
            "slide": lambda: window.slide(),
            "recall": lambda: window.recall(first),
            "reorder": lambda: window.reorder([4, 3, 2, 1, 0]),
            "back": lambda: window.reorder([4, 3, 2, 1, 0]),
        }
        answers = {}
        for name, step in steps.items():
            step()
            answers[name] = [digest(window.next_token_logits(QUESTION)), *(s.guarantee for s in window.slots)]
        window.flush()
    return {"answers": answers, "objects": stored(folder)}


def stored(folder: Path) -> list[dict[str, str]]:
    """The tensors of each object, in an order that names of files do not decide."""
    found = []
    for path in folder.glob("objects/*/*.safetensors"):
        with safe_open(path, "pt") as held:
            found.append({name: digest(held.get_tensor(name)) for name in sorted(held.keys())})
    return sorted(found, key=lambda tensors: sorted(tensors.items()))


def main() -> None:
    """Walk and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = walk(Path(folder) / "store")
    print(json.dumps({"command": "python -m lab.contents", "commit": commit(), **found}, indent=1))


if __name__ == "__main__":
    main()
