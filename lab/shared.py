"""What several system prompts cost that are shown the same frames. ``python -m lab.shared``.

Each of four prompts is given the same sixteen frames in a window of its own, over one store in a folder;
then every prompt is opened once more and given them again, and its window is saved and loaded. Counted are
vision encodes, decoder forwards and the store's bytes by kind of object. None of it is a time, so the table
is the same on every machine. It runs on any commit whose windows have `append`, `save` and `load`.

    python -m lab.shared [--output FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import kamera
from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.engines.hf import HfEngine
from lab.results import keep
from lab.speed.content import picture_chunk
from lab.speed.machine import commit
from lab.speed.presets import TINY

PROMPTS = (
    testbed.SYSTEM,
    f"{testbed.SYSTEM} You plan.",
    f"{testbed.SYSTEM} You point at things.",
    f"{testbed.SYSTEM} You check what others did.",
)
FRAMES = 16
POLICIES = {
    "exact": ReusePolicy(minimum="exact", certified=False),
    "patched": ReusePolicy(certified=False, forms="always"),
}


def frames_of(backbone: HfEngine) -> list[Chunk]:
    """Sixteen pictures of the demo's world, with their captions."""
    episodes = (testbed.World(0).episode(i, layout="LRLI") for i in range(FRAMES // 4))
    return [backbone.chunk(frame.content) for episode in episodes for frame in episode.frames]


def tiny() -> tuple[HfEngine, Sequence[Any], list[Chunk]]:
    """Two layers of random weights: prompts are token ids, frames random pictures."""
    backbone = TINY.build(dtype=torch.float32)
    prompts = [torch.arange(10, 20 + i) for i in range(len(PROMPTS))]
    return backbone, prompts, [picture_chunk(backbone, TINY, 24, seed) for seed in range(FRAMES)]


def rows(backbone: HfEngine, prompts: Sequence[Any], frames: Sequence[Chunk], policy: str) -> Iterator[Any]:
    """What each round cost, and what the store holds behind it."""
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "s") as store:
        for name in ("first windows", "second windows", "load"):
            labels: Counter[str] = Counter()
            with backbone.measure() as work:
                for i, prompt in enumerate(prompts):
                    saved = Path(folder) / f"w{i}"
                    if name == "load":
                        window = KameraWindow.load(saved, backbone, store)
                    else:
                        window = KameraWindow(backbone, store, prompt, policy=POLICIES[policy])
                        for frame in frames:
                            window.append(frame)
                        window.save(saved)
                    labels.update(slot.guarantee for slot in window.slots)
            kinds: Counter[str] = Counter()
            for info in store.ls():
                kinds["patch" if info.rank is not None else info.kind] += info.bytes
            yield {
                "round": name,
                "policy": policy,
                "encodes": work.vision_encodes,
                "forwards": work.forwards,
                "tokens": work.tokens,
                "guarantees": dict(labels),
                "stored_bytes": {**dict(sorted(kinds.items())), "all": kinds.total()},
            }


def measure() -> dict[str, Any]:
    """Both backbones under both policies."""
    shipped = HfEngine(*testbed.load())
    arms = {"tiny": tiny(), "gqa": (shipped, PROMPTS, frames_of(shipped))}
    return {name: [row for policy in POLICIES for row in rows(*arm, policy)] for name, arm in arms.items()}


def main() -> None:
    """Measure, print a table, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.shared", description=__doc__)
    parser.add_argument("--output", type=Path, help="write JSON there")
    asked = parser.parse_args()
    made: dict[str, Any] = {
        "command": "python -m lab.shared",
        "commit": commit(Path(kamera.__file__).parents[1]),
        "prompts": len(PROMPTS),
        "frames": FRAMES,
        "backbones": measure(),
    }
    for name, found in made["backbones"].items():
        for row in found:
            mib = row["stored_bytes"]["all"] / 2**20
            print(
                f"{name:5} {row['policy']:8} {row['round']:15} encodes {row['encodes']:3} "
                f"forwards {row['forwards']:4} stored {mib:8.2f} MiB {row['guarantees']}"
            )
    if asked.output is not None:
        keep(made, asked.output)


if __name__ == "__main__":
    main()
