"""Boundary states against patches: which repairs more of a moved chunk, per family and byte.

    python -m lab.reuse.boundary [--windows 12] [--families gqa,…] [--output FILE]

A boundary state (papers/cross-query-kv-reuse, regime B) is the hidden state of every token at a cut, computed
behind the anchor alone. The layers below the cut keep the canonical's KV, those above run in context. It is
stored beside the canonical, so that the cut can be chosen when it is served (multicut): ``hidden`` bytes per
token and cut. Alone, without the KV that it replaces, it takes 2·d_kv·layers + d_model. Both are given, as
shares of the chunk's KV, and each cut is compared with the patch of as many bytes.

`multicut@τ` takes the deepest cut below which two probed tokens, recomputed in context, are like the held
ones in every layer (cosine at least τ).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera.certify.metrics import eta
from kamera.engines.hf import HfEngine
from kamera.ops import KV
from lab.arms import Arm, Served
from lab.baselines.cacheblend import CacheBlend
from lab.baselines.rows import row_bytes
from lab.paper.draw import MAIN, Bench
from lab.recompute import Resume, hidden_states, recompute
from lab.repairs import PlainPatch
from lab.results import keep
from lab.scene import Scene
from lab.speed.machine import commit, machine
from lab.testbed import BACKBONES, load

LIKE = (0.99, 0.95, 0.9)
"""Thresholds of the run-time choice."""


@dataclass(frozen=True)
class Boundary:
    """Layers before ``cut`` as the canonical has them, the others recomputed from the state at ``cut``."""

    cut: int
    per_question = False

    @property
    def name(self) -> str:
        """``boundary@cut``."""
        return f"boundary@{self.cut}"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """The mixed KV; stored is the hidden state."""
        made = above(scene, self.cut)
        layers, tokens = len(scene.layout), scene.target.num_tokens
        return Served(made, hidden_bytes(scene), tokens * (layers - self.cut) / layers, 1)


@dataclass(frozen=True)
class Multicut:
    """The deepest cut that the probe finds safe; the whole chunk is prefilled if none but the first is."""

    least: float
    per_question = False

    @property
    def name(self) -> str:
        """``multicut@least``."""
        return f"multicut@{self.least:g}"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """The mixed KV; a state is stored at every cut."""
        layers, tokens = len(scene.layout), scene.target.num_tokens
        cut = deepest(scene, self.least)
        kv = scene.blind if cut == layers else above(scene, cut) if cut > 0 else scene.conditioned
        rows = tokens * (layers - cut) / layers + 2
        return Served(kv, (layers - 1) * hidden_bytes(scene), rows, 2)


def above(scene: Scene, cut: int) -> KV:
    """The canonical's KV below ``cut``, KV recomputed in context from the canonical's state at it above."""
    entry = hidden_states(scene.backbone, scene.encoded, scene.canonical_positions, scene.anchor.kv, cut)
    return recompute(
        scene.backbone,
        scene.encoded,
        scene.positions,
        scene.context,
        scene.blind,
        torch.arange(scene.target.num_tokens),
        resume=Resume(cut, entry),
    ).kv


def deepest(scene: Scene, least: float) -> int:
    """The number of first layers in which two probed tokens' fresh KV is like the held one."""
    count = scene.target.num_tokens
    rows = torch.tensor([count // 2, count - 1])
    fresh = recompute(scene.backbone, scene.encoded, scene.positions, scene.context, scene.blind, rows).kv
    for layer, (new, old) in enumerate(zip(fresh, scene.blind, strict=True)):
        for name in old:
            a, b = (t[:, rows].double().transpose(0, 1).flatten(1) for t in (new[name], old[name]))
            if float(torch.nn.functional.cosine_similarity(a, b, dim=1).min()) < least:
                return layer
    return len(scene.layout)


def hidden_bytes(scene: Scene) -> int:
    """Bytes of one boundary state: d_model per token, in the KV's dtype."""
    width = scene.backbone.model.get_input_embeddings().weight.shape[1]
    return scene.target.num_tokens * width * scene.dtype.itemsize


def rank_of(scene: Scene, nbytes: int) -> int:
    """The largest rank of a plain patch of at most ``nbytes``; at least 1."""
    rank = 1
    while rank < scene.target.num_tokens and scene.budget(rank + 1) <= nbytes:
        rank += 1
    return rank


def measure(name: str, windows: int) -> dict[str, Any]:
    """Every cut, the patch of equal bytes, and the references, on one backbone."""
    backbone = HfEngine(*load(name))
    bench = Bench.prepare(backbone, 0, 1)
    layers = len(backbone.layout)
    rows: dict[str, list[Any]] = defaultdict(list)
    facts: dict[str, Any] = {}
    for index in range(windows):
        trial = bench.stage(index).trial(MAIN)
        scene = trial.scene
        rank = rank_of(scene, hidden_bytes(scene))
        arms: list[Arm] = [Boundary(cut) for cut in range(1, layers)]
        arms += [Multicut(least) for least in LIKE]
        arms += [PlainPatch(r) for r in sorted({rank, 4, 16, 32})]
        arms.append(CacheBlend(max(1, _fifteen(scene))))
        rows["re-prefill"].append(trial.reprefill)
        rows["blind"].append(trial.blind)
        for arm in arms:
            label = "cacheblend 15 %" if isinstance(arm, CacheBlend) else arm.name
            rows[label].append(trial.judge(arm))
        sizes = row_bytes(scene)
        facts = {
            "layers": layers,
            "tokens": scene.target.num_tokens,
            "KV bytes per token": sum(sizes),
            "hidden bytes per token": hidden_bytes(scene) // scene.target.num_tokens,
            "share of one state": hidden_bytes(scene) / scene.chunk_bytes,
            "share of one state alone": [
                (sum(sizes[:cut]) * scene.target.num_tokens + hidden_bytes(scene)) / scene.chunk_bytes
                for cut in range(1, layers)
            ],
            "rank of equal bytes": rank,
        }
    blind = np.concatenate([j.kl for j in rows["blind"]])
    table = []
    for label, judged in rows.items():
        multi = np.concatenate([j.hops for j in judged]) > 1
        kl = np.concatenate([j.kl for j in judged])
        table.append(
            {
                "arm": label,
                "accuracy": float(np.concatenate([j.right for j in judged])[multi].mean()),
                "agreement": float(np.concatenate([j.agree for j in judged]).mean()),
                "kl": float(kl.mean()),
                "eta": eta(kl.tolist(), blind.tolist()),
                "stored share": float(np.mean([j.share for j in judged])),
                "recomputed share": float(np.mean([j.tokens for j in judged])) / facts["tokens"],
                "questions": len(kl),
            }
        )
    return {"family": name, **facts, "arms": table}


def _fifteen(scene: Scene) -> int:
    """The rank whose bytes pay for 15 % of the chunk's tokens."""
    return rank_of(scene, int(0.15 * scene.chunk_bytes))


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.boundary")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--families", default=",".join(BACKBONES))
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in asked.families.split(","):
        made = measure(name, asked.windows)
        found.append(made)
        print({k: v for k, v in made.items() if k != "arms"})
        for row in made["arms"]:
            print(
                "  ",
                "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()),
                flush=True,
            )
    if asked.output is not None:
        command = f"python -m lab.reuse.boundary --windows {asked.windows} --families {asked.families}"
        document = {"command": command, "commit": commit(), "machine": machine(), "families": found}
        keep(document, asked.output)


if __name__ == "__main__":
    main()
