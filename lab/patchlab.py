"""What makes a patch small: each way of spending bytes alone, and all together, at equal bytes.

``python -m lab.patchlab --output patches.json`` makes the first table of `docs/patches.md`.
The fitted parts (readers, shared basis) are measured on other episodes than those that are scored.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera import testbed
from kamera.certify.metrics import bootstrap, eta, kl
from kamera.engines.hf import HfEngine
from kamera.ops import Bits, LowRank, Patch, allocate, compress, floats, kv_bytes, quantize
from kamera.patches.anchor import Anchor, prefill_anchor
from kamera.trust import Estimate
from lab import weighted
from lab.basis import Basis
from lab.coded import coded
from lab.readers import Reading, measure_readers
from lab.results import keep
from lab.scene import Scene
from lab.testbed import BACKBONES, load
from lab.weighted import Readers

FITTED, SCORED = 860_000, 870_000
"""Seeds of the episodes that readers and basis are fitted on, and of those asked here: both held out."""

SHARES = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.06, 0.12)
"""Budgets as shares of the chunk's KV in bf16."""

LAYOUT = "LLRI"
"""Two legends, a rename, and the items frame whose KV is reused: two and three hops."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A scene, the questions asked behind it, and the token that answers each."""

    scene: Scene
    questions: tuple[torch.Tensor, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One way of spending one budget. ``spent`` is the mean share of the chunk's bf16 KV bytes."""

    method: str
    share: float
    spent: float
    n: int
    accuracy: Estimate
    kl: float
    eta: float


@dataclass(frozen=True)
class Table:
    """All rows; ``share`` 0 is blind reuse and 1 the re-prefill."""

    rows: tuple[Row, ...]
    episodes: int
    fitted: int
    chunk_tokens: tuple[int, ...]


Method = Callable[[Scene, int], tuple[Patch, int]]
"""A patch of a scene's deficit within a budget of bytes, and the bytes of it that are stored per chunk."""


def methods(readers: Readers, basis: Basis) -> dict[str, Method]:
    """The ways to spend a budget, by name."""

    def uniform(bits: Bits | None, weights: Readers | None) -> Method:
        return lambda scene, budget: _counted(_one_rank(scene, budget, bits, weights))

    def spread(widths: Sequence[Bits], weights: Readers | None) -> Method:
        def spend(scene: Scene, budget: int) -> tuple[Patch, int]:
            delta, layout, dtype = scene.delta, scene.layout, torch.bfloat16
            if weights is None:
                formed = compress(delta, layout, budget, widths=widths, dtype=dtype)
            else:
                formed = weighted.compress(delta, layout, budget, weights, widths=widths, dtype=dtype)
            return _counted(formed.patch)

        return spend

    return {
        "plain (bf16, one rank)": uniform(None, None),
        "weighted": uniform(None, readers),
        "spread": spread((), None),
        "weighted, spread": spread((), readers),
        "8 bits": uniform(8, None),
        "spread, 8 bits": spread((8,), None),
        "weighted, spread, 8 bits": spread((8,), readers),
        "weighted, spread, 4 bits": spread((4,), readers),
        "spread, 8 or 4 bits": spread((8, 4), None),
        "weighted, spread, 8 or 4 bits": spread((8, 4), readers),
        "shared basis, spread, 8 bits": lambda scene, budget: _on_basis(scene, budget, basis),
    }


def measure(
    backbone: HfEngine, *, items: int = 500, fit: int = 12, shares: Sequence[float] = SHARES
) -> Iterator[str | Table]:
    """Score every method at every budget on at least ``items`` questions; yields what it does.

    Asked is what the antecedents fix: values that other frames than the reused one decide.
    """
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    yield f"fitting on {fit} episodes"
    fitting = [_asked(backbone, anchor, FITTED, i) for i in range(fit)]
    readers = measure_readers(backbone, (r for asked in fitting for r in readings(asked)))
    ways = methods(readers, Basis.fit(asked.scene for asked in fitting))
    outcomes: dict[tuple[str, float], list[tuple[bool, float, float]]] = {}
    done, episode, tokens = 0, 0, set()
    while done < items:
        asked = _asked(backbone, anchor, SCORED, episode)
        scene, whole = asked.scene, _bf16_bytes(asked.scene)
        truth = scene.logits(scene.conditioned, asked.questions)
        blind = scene.logits(scene.blind, asked.questions)
        outcomes.setdefault(("re-prefill", 1.0), []).extend(_judge(asked, truth, truth, 1.0))
        outcomes.setdefault(("blind", 0.0), []).extend(_judge(asked, blind, truth, 0.0))
        for name, way in ways.items():
            for share in shares:
                patch, stored = way(scene, int(share * whole))
                said = scene.logits(scene.patched(patch), asked.questions)
                judged = _judge(asked, said, truth, stored / whole)
                outcomes.setdefault((name, share), []).extend(judged)
        done += len(asked.questions)
        episode += 1
        tokens.add(scene.target.num_tokens)
        yield f"{min(done, items)} of {items} questions"
    lost = [diverged for _, diverged, _ in outcomes["blind", 0.0]]
    rows = tuple(_row(method, share, seen, lost) for (method, share), seen in outcomes.items())
    yield Table(rows, episode, fit, tuple(sorted(tokens)))


def readings(asked: Asked) -> list[Reading]:
    """What `measure_readers` takes: questions of one length at a time."""
    scene = asked.scene
    by_length = groupby(sorted(asked.questions, key=len), key=len)
    return [
        Reading(
            scene.context,
            scene.canonical,
            scene.delta,
            scene.offset,
            tuple(questions),
            scene.question_positions(length),
        )
        for length, questions in by_length
    ]


def _asked(backbone: HfEngine, anchor: Anchor, seed: int, index: int) -> Asked:
    episode = testbed.World(seed).episode(index, layout=LAYOUT)
    *before, target = (backbone.chunk(frame.content) for frame in episode.frames)
    scene = Scene(backbone, anchor, before, target)
    values = (episode.ask(*subject) for subject in episode.subjects(["value"]))
    bound = [question for question in values if question.bound]
    return Asked(
        scene,
        tuple(scene.question(question.text) for question in bound),
        tuple(int(backbone.builder.tokenize(question.answer)[0]) for question in bound),
    )


def _bf16_bytes(scene: Scene) -> int:
    return kv_bytes(scene.canonical) * 2 // scene.dtype.itemsize


def _judge(
    asked: Asked, said: torch.Tensor, truth: torch.Tensor, spent: float
) -> list[tuple[bool, float, float]]:
    """(right, KL to the re-prefill, share of bytes) of every question."""
    return [
        (int(logits.argmax()) == answer, kl(logits, ideal), spent)
        for logits, ideal, answer in zip(said, truth, asked.answers, strict=True)
    ]


def _row(method: str, share: float, seen: Sequence[tuple[bool, float, float]], blind: Sequence[float]) -> Row:
    right, diverged, spent = zip(*seen, strict=True)
    return Row(
        method,
        share,
        float(np.mean(spent)),
        len(seen),
        bootstrap([float(r) for r in right]),
        float(np.mean(diverged)),
        eta(diverged, blind),
    )


def _counted(patch: Patch) -> tuple[Patch, int]:
    return patch, patch.nbytes


def _one_rank(scene: Scene, budget: int, bits: Bits | None, readers: Readers | None) -> Patch:
    """The largest rank for all layers and channels that the budget holds."""
    layers = []
    for i, layer in enumerate(scene.delta):
        metrics = {name: None if readers is None else readers.metric(i, name) for name in layer}
        factored = {name: weighted.factor(delta, None, metrics[name]) for name, delta in layer.items()}
        layers.append(
            {
                name: LowRank(*(floats(side).to(torch.bfloat16) for side in (low.left, low.right)))
                for name, low in factored.items()
                if low.rank
            }
        )
    whole = Patch.of(layers, scene.delta.groups)
    best = whole.truncate(0)
    for rank in range(1, whole.rank + 1):
        cut = whole.truncate(rank)
        cut = cut if bits is None else coded(cut, bits)
        if cut.nbytes > budget:
            break
        best = cut
    return best


def _on_basis(scene: Scene, budget: int, basis: Basis) -> tuple[Patch, int]:
    """8-bit coefficients on directions that all chunks share, spread by energy; only they are counted."""
    tokens = scene.target.num_tokens
    spanned = {
        (i, name): delta.float() @ basis.layers[i][name]
        for i, layer in enumerate(scene.delta)
        for name, delta in layer.items()
    }
    # directions are ordered by what they carry of all chunks; of this one a later may carry more
    gains = {key: left.square().sum(0).cummin(0).values for key, left in spanned.items()}
    ranks = allocate(gains, dict.fromkeys(gains, tokens + 4), budget)
    layers: list[dict[str, LowRank]] = [{} for _ in scene.delta]
    stored = 0
    for (i, name), rank in ranks.items():
        if rank:
            left = quantize(spanned[i, name][:, :rank])
            layers[i][name] = LowRank(left, basis.layers[i][name][:, :rank])
            stored += left.nbytes
    return Patch.of(layers, scene.delta.groups), stored


def main() -> None:
    """Measure on a shipped backbone and write the table as JSON."""
    parser = argparse.ArgumentParser(prog="python -m lab.patchlab", description=__doc__)
    parser.add_argument("--family", default="gqa", choices=sorted(BACKBONES), help="which backbone")
    parser.add_argument("--items", type=int, default=500, help="questions per row, at least")
    parser.add_argument("--fit", type=int, default=12, help="episodes that readers and basis are fitted on")
    parser.add_argument("--output", type=Path, required=True, help="where the JSON goes")
    options = parser.parse_args()
    backbone = HfEngine(*load(options.family))
    for step in measure(backbone, items=options.items, fit=options.fit):
        if isinstance(step, str):
            print(step, flush=True)
            continue
        document: dict[str, Any] = {
            "command": f"python -m lab.patchlab --family {options.family} "
            f"--items {options.items} --fit {options.fit}",
            "family": options.family,
            "backbone": backbone.fingerprint,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "layout": LAYOUT,
            **asdict(step),
        }
        keep(document, options.output)
        for row in step.rows:
            print(f"{row.method:32} {row.share:7.2%} {row.accuracy.mean:.3f} {row.kl:.1e} {row.eta:.4f}")


if __name__ == "__main__":
    main()
