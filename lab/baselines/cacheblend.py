"""CacheBlend (arXiv:2405.16444): recompute the tokens whose KV deviates most, filtered from layer to layer.

The method computes an early layer for all tokens, keeps those whose KV is furthest from the reused copy,
and drops a few more of them at each deeper layer, so that the mean over layers meets the budget.

Strongest form: chunks of the context are exact, recomputed tokens attend to all of it and to the mixed KV
of their own chunk; K and V deviations count alike; the check layer is the first whose KV can deviate at
all (its input is exact for every token), and its full computation is paid for in compute, not in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera.ops import LayerKV
from lab.arms import Served
from lab.baselines.deviation import deviation, highest
from lab.baselines.rows import Budgeted, live_layers, rows_bytes, spread
from lab.recompute import recompute
from lab.scene import Scene

SLOPE = 0.5
"""The check layer keeps this share of rows above the mean, the last layer as many below it."""


@dataclass(frozen=True)
class CacheBlend(Budgeted):
    """High-deviation tokens, recomputed in context; the rest blind."""

    kind = "cacheblend"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV with the tokens that survive the filter fresh, fewer in deeper layers."""
        live, tokens = live_layers(scene), scene.target.num_tokens
        weights = [0.0] * len(scene.layout)
        for step, layer in enumerate(live):
            weights[layer] = 1 + SLOPE * (1 - 2 * step / max(1, len(live) - 1))
        counts = spread(scene, self.rank, weights)

        def keep(layer: int, rows: torch.Tensor, fresh: LayerKV, held: LayerKV) -> torch.Tensor:
            if layer < live[0]:
                return rows
            return rows[highest(deviation(fresh, held), min(counts[layer], rows.numel()))]

        with scene.backbone.measure() as work:
            made = recompute(
                scene.backbone,
                scene.encoded,
                scene.positions,
                scene.context,
                scene.blind,
                torch.arange(tokens),
                keep=keep,
            )
        # a layer computes what the layer before it kept
        computed = [tokens] * (live[0] + 1) + [made.rows[i].numel() for i in live[:-1]]
        return Served(made.kv, rows_bytes(scene, made.rows), sum(computed) / len(scene.layout), work.forwards)
