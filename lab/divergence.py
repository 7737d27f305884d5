"""Does the divergence of antecedents tell how wrong a patch of other antecedents is?

    python -m lab.divergence [--items 40] [--family gqa] [--format json] [--output FILE]

A held-out episode is two legends, a distractor and a frame of items behind them. The patch of the items
frame is formed behind twelve variants of what stands there and served behind the original; its KL to
the re-prefill, over the questions that bind, is held against what `kamera.patches.near` says
of the two sets: the plain set distance, and the one in which pictures that look alike count as partly
the same, without and with the order of the chunks.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kamera import Chunk, ChunkStore, testbed
from kamera.certify.metrics import kl_items
from kamera.engines.hf import HfEngine
from kamera.ops import NO_KV, patch_of
from kamera.patches.anchor import prefill_anchor
from kamera.patches.near import disorder, divergence, likeness
from kamera.store import CanonicalRecord, picture_embedding
from lab.scene import Scene
from lab.speed.machine import machine
from lab.testbed import load

RANK = 32
Row = dict[str, Any]


def recompressed(image: Image.Image) -> Image.Image:
    """The same frame as another file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return Image.open(file).convert("RGB")


def variants(
    own: Sequence[Chunk], again: Sequence[Chunk], other: Sequence[Chunk]
) -> Mapping[str, list[Chunk]]:
    """What the patch is formed behind, by name; ``own`` is what it is served behind."""
    first, second, picture = own
    return {
        "one legend re-encoded": [first, again[1], picture],
        "all re-encoded": list(again),
        "distractor re-encoded": [first, second, again[2]],
        "distractor gone": [first, second],
        "another distractor": [first, second, other[2]],
        "one distractor more": [first, second, picture, other[2]],
        "another legend": [first, other[1], picture],
        "other legends": [other[0], other[1], picture],
        "one legend more": [first, second, other[0], picture],
        "a legend gone": [first, picture],
        "legends swapped": [second, first, picture],
        "distractor in front": [picture, first, second],
    }


def run(items: int, family: str) -> list[Row]:
    """One row per episode and variant."""
    backbone = HfEngine(*load(family))
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    store, context = ChunkStore.open("memory://"), anchor.identity.context(anchor.digest, "")
    alike = likeness(store, context)

    def chunk(image: Image.Image, caption: str) -> Chunk:
        made = backbone.chunk([{"type": "image", "image": image}, {"type": "text", "text": caption}])
        encoded = backbone.encode(made)
        looks = picture_embedding(made.input_ids, encoded.tensors, backbone.builder.vision_tokens)
        where = backbone.positions([made.input_ids], [made.position_inputs()])
        store.put(CanonicalRecord(made.id, context, made.input_ids, where, NO_KV, embedding=looks))
        return made

    rows: list[Row] = []
    world = testbed.World(seed=77)
    for item in range(items):
        episode, elsewhere = world.episode(item, layout="LLPI"), world.episode(1000 + item, layout="LLP")
        *own, target = (chunk(frame.image, frame.caption) for frame in episode.frames)
        again = [chunk(recompressed(frame.image), frame.caption) for frame in episode.frames[:3]]
        other = [chunk(frame.image, frame.caption) for frame in elsewhere.frames]
        scene = Scene(backbone, anchor, own, target)
        asked = [scene.question(q.text) for q in episode.questions if q.bound][:6]
        if not asked:
            continue
        truth = scene.logits(scene.conditioned, asked)
        here = [c.id for c in own]
        for name, antecedents in variants(own, again, other).items():
            there = [c.id for c in antecedents]
            patch = patch_of(scene.behind(antecedents).delta, RANK, scene.dtype).patch
            rows.append(
                {
                    "item": item,
                    "variant": name,
                    "kl": float(kl_items(scene.logits(scene.patched(patch), asked), truth).mean()),
                    "plain": divergence(here, there),
                    "alike": divergence(here, there, alike),
                    "disorder": disorder(there, here),
                }
            )
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Rank correlations with the KL, the KL of what each measure calls nearest, and means by variant."""
    kl = np.array([row["kl"] for row in rows])
    items = np.array([row["item"] for row in rows])
    orders = {
        "plain": [(row["plain"],) for row in rows],
        "alike": [(row["alike"],) for row in rows],
        "alike and order": [(1 - (1 - row["alike"]) * (1 - row["disorder"] / 2),) for row in rows],
    }
    measures = {}
    for name, keys in orders.items():
        places = {key: place for place, key in enumerate(sorted(set(keys)))}
        ranks = np.array([places[key] for key in keys], dtype=float)
        first = [
            kl[items == i][ranks[items == i] == ranks[items == i].min()].mean() for i in np.unique(items)
        ]
        measures[name] = {"spearman": _spearman(ranks, kl), "kl_of_the_nearest": float(np.mean(first))}
    names = dict.fromkeys(row["variant"] for row in rows)
    mean = {name: _means([row for row in rows if row["variant"] == name]) for name in names}
    return {"items": len(np.unique(items)), "pairs": len(rows), "measures": measures, "variants": mean}


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return {
        name: float(np.mean([row[name] for row in rows])) for name in ("kl", "plain", "alike", "disorder")
    }


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--family", default="gqa")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = {"machine": machine(), "family": args.family, **summary(run(args.items, args.family))}
    lines = [f"{found['items']} episodes, {found['pairs']} pairs, {args.family}"]
    for name, m in found["measures"].items():
        lines.append(
            f"{name:<24} Spearman {m['spearman']:6.3f}   KL of the nearest {m['kl_of_the_nearest']:.4f}"
        )
    for name, m in found["variants"].items():
        lines.append(f"{name:<24} KL {m['kl']:7.4f}   plain {m['plain']:.2f}   alike {m['alike']:.2f}")
    text = json.dumps(found, indent=2) if args.format == "json" else "\n".join(lines)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
