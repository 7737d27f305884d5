"""What it costs to keep canonicals in codes: answers behind a chunk that comes out of a store of codes.

``python -m lab.codedkv --output coded.json`` measures the table of docs/results/coded.md on every
shipped backbone, on held-out episodes.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from kamera import testbed
from kamera.certify.metrics import bootstrap, kl
from kamera.engines.hf import HfEngine
from kamera.ops import KV, Patch, PatchBudget, apply_patch, code_kv, deficit
from kamera.ops.quantize_kv import KV_CODECS
from kamera.patches.anchor import Anchor, prefill_anchor
from kamera.trust import Estimate, ReusePolicy
from lab.results import keep
from lab.scene import Scene
from lab.testbed import FAMILIES, load

SEED = 910_000
"""Episodes asked here; the backbones were trained on seeds of a million and above."""

LAYOUT = "LLRI"
"""Two legends, a rename, and the items frame whose KV is stored: two and three hops."""


@dataclass(frozen=True)
class Row:
    """One way to keep and serve the chunk.

    ``kv_share`` and ``patch_share`` are bytes stored as shares of the chunk's KV bytes, ``loss`` the
    relative error of the codes, ``error`` that of the KV served against the re-prefill's (means over
    episodes); ``agreement`` the share of answers that are the re-prefill's.
    """

    arm: str
    n: int
    accuracy: Estimate
    kl: float
    agreement: float
    error: float
    loss: float
    kv_share: float
    patch_share: float


@dataclass(frozen=True)
class Table:
    """All rows of one backbone."""

    family: str
    backbone: str
    dtype: str
    episodes: int
    budget: PatchBudget
    rows: tuple[Row, ...]


@dataclass(frozen=True, eq=False)
class Arm:
    """A chunk as it is served at its place, and what was stored for it."""

    kv: KV
    kv_bytes: int
    patch_bytes: int = 0
    loss: float = 0.0


def arms(scene: Scene, budget: PatchBudget) -> dict[str, Arm]:
    """The chunk in every form, with and without a patch.

    "codes alone" codes the KV the model computed in context: what a leading chunk loses. "patch of
    as-is" is the mismatch that keys rule out: a patch formed against the canonical as it is, applied to
    a coded one.
    """
    whole = scene.chunk_bytes
    plain = _formed(scene, scene.canonical, budget)
    served = {
        "re-prefill": Arm(scene.conditioned, 0),
        "blind": Arm(scene.blind, whole),
        "as-is, patch": Arm(_applied(scene, scene.canonical, plain), whole, plain.nbytes),
    }
    for codec in KV_CODECS:
        coded = code_kv(scene.canonical, codec)
        dense = coded.dense()
        patch = _formed(scene, dense, budget)
        loss, alone = coded.loss.relative, code_kv(scene.conditioned, codec)
        served |= {
            f"{codec} alone": Arm(alone.dense(), alone.nbytes, 0, alone.loss.relative),
            f"{codec}, patch": Arm(_applied(scene, dense, patch), coded.nbytes, patch.nbytes, loss),
            f"{codec}, patch of as-is": Arm(_applied(scene, dense, plain), coded.nbytes, plain.nbytes, loss),
        }
    return served


def measure(backbone: HfEngine, family: str, *, items: int, budget: PatchBudget) -> Iterator[str | Table]:
    """Ask at least ``items`` questions behind every arm; yields progress, at last the table."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    seen: dict[str, list[tuple[bool, float, bool]]] = {}
    sizes: dict[str, list[tuple[float, float, float, float]]] = {}
    done = episode = 0
    dtype = ""
    while done < items:
        scene, questions, truths = _asked(backbone, anchor, episode)
        ideal = scene.logits(scene.conditioned, questions)
        for name, arm in arms(scene, budget).items():
            said = scene.logits(arm.kv, questions)
            seen.setdefault(name, []).extend(
                (int(mine.argmax()) == truth, kl(mine, best), int(mine.argmax()) == int(best.argmax()))
                for mine, best, truth in zip(said, ideal, truths, strict=True)
            )
            shares = arm.kv_bytes / scene.chunk_bytes, arm.patch_bytes / scene.chunk_bytes
            sizes.setdefault(name, []).append((_error(arm.kv, scene.conditioned), arm.loss, *shares))
        dtype = str(scene.dtype).removeprefix("torch.")
        done, episode = done + len(questions), episode + 1
        yield f"{family}: {min(done, items)} of {items} questions"
    rows = tuple(_row(name, outcomes, sizes[name]) for name, outcomes in seen.items())
    yield Table(family, backbone.fingerprint, dtype, episode, budget, rows)


def _asked(backbone: HfEngine, anchor: Anchor, index: int) -> tuple[Scene, list[torch.Tensor], list[int]]:
    """A scene, questions on values that its antecedents fix, and the tokens that answer them."""
    episode = testbed.World(SEED).episode(index, layout=LAYOUT)
    *before, target = (backbone.chunk(frame.content) for frame in episode.frames)
    scene = Scene(backbone, anchor, before, target)
    bound = [q for q in (episode.ask(*s) for s in episode.subjects(["value"])) if q.bound]
    truths = [int(backbone.builder.tokenize(q.answer)[0]) for q in bound]
    return scene, [scene.question(q.text) for q in bound], truths


def _formed(scene: Scene, canonical: KV, budget: PatchBudget) -> Patch:
    deltas = deficit(scene.conditioned, canonical, scene.layout, scene.offset)
    return budget.form(deltas, scene.layout, canonical).formed.patch


def _applied(scene: Scene, canonical: KV, patch: Patch) -> KV:
    return apply_patch(canonical, patch, scene.layout, scene.offset)


def _error(kv: KV, truth: KV) -> float:
    pairs = [(a[n].double(), b[n].double()) for a, b in zip(kv, truth, strict=True) for n in b]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return float(np.sqrt(off / sum(float(b.square().sum()) for _, b in pairs)))


def _row(
    arm: str, outcomes: Sequence[tuple[bool, float, bool]], sizes: Sequence[tuple[float, float, float, float]]
) -> Row:
    right, diverged, agreed = zip(*outcomes, strict=True)
    error, loss, kv_share, patch_share = (float(x) for x in np.mean(sizes, axis=0))
    return Row(
        arm,
        len(right),
        bootstrap([float(r) for r in right]),
        float(np.mean(diverged)),
        float(np.mean(agreed)),
        error,
        loss,
        kv_share,
        patch_share,
    )


def markdown(tables: Sequence[Table]) -> str:
    """The rows as a table for the documentation."""
    lines = [
        "| family | arm | n | accuracy (95 %) | KL, nats | agreement | KV error | codes' loss | KV | patch |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for table in tables:
        for r in table.rows:
            accuracy = f"{r.accuracy.mean:.3f} ({r.accuracy.low:.3f} to {r.accuracy.high:.3f})"
            lines.append(
                f"| {table.family} | {r.arm} | {r.n} | {accuracy} | {r.kl:.1e} | {r.agreement:.3f} "
                f"| {r.error:.1e} | {r.loss:.1e} | {r.kv_share:.1%} | {r.patch_share:.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure on shipped backbones; JSON to a file, the table in Markdown to the terminal."""
    budget = ReusePolicy().budget
    families = sorted(FAMILIES)
    parser = argparse.ArgumentParser(prog="python -m lab.codedkv", description=__doc__)
    parser.add_argument("--family", action="append", choices=families, help="which backbone; default: all")
    parser.add_argument("--items", type=int, default=100, help="questions per row, at least")
    parser.add_argument("--rank", type=int, default=budget.rank, help="directions of a patch, at most")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    options = parser.parse_args()
    chosen = options.family or families
    budget = PatchBudget(options.rank, budget.share)
    tables: list[Table] = []
    for family in chosen:
        for step in measure(HfEngine(*load(family)), family, items=options.items, budget=budget):
            if isinstance(step, Table):
                tables.append(step)
            else:
                print(step, flush=True)
    document = {
        "command": "python -m lab.codedkv "
        + " ".join(f"--family {f}" for f in chosen)
        + f" --items {options.items} --rank {options.rank}",
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "layout": LAYOUT,
        "tables": [asdict(table) for table in tables],
    }
    keep(document, options.output)
    print(markdown(tables))


if __name__ == "__main__":
    main()
