"""The tokens that truly deviate most, exact: the ideal CacheBlend (arXiv:2405.16444) approximates.

What a selector of one set of tokens by KV deviation would do if it knew the deficit at every layer and if
recomputing a token gave its true KV. Both come from a re-prefill, so this arm saves nothing. It bounds the
deficit's energy such a set can restore; answers need not follow energy, so it is no bound in KL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.arms import Served
from lab.baselines.deviation import highest
from lab.baselines.rows import Budgeted, everywhere, mix, rows_bytes, tokens_afforded
from lab.scene import Scene


@dataclass(frozen=True)
class DeviationOracle(Budgeted):
    """Tokens of the largest ‖Δ‖ over all layers and channels, exact; the rest blind."""

    kind = "deviation-oracle"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV with the top tokens' rows from the re-prefill at every layer."""
        norms = torch.stack(
            [d.double().square().sum(1).cpu() for layer in scene.delta for d in layer.values()]
        )
        rows = everywhere(scene, highest(norms.sum(0), tokens_afforded(scene, self.rank)))
        kv = mix(scene, scene.conditioned, rows)
        return Served(kv, rows_bytes(scene, rows), float(scene.target.num_tokens), 1)
