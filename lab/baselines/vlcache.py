"""VLCache (arXiv:2512.12977): recompute a head of the chunk whose length differs from layer to layer.

The method observes that errors of earlier reused tokens spread to later ones, and that layers differ in
how much recomputation they deserve; it recomputes the first tokens, more of them where a layer is
sensitive. Its layer shares come from profiling.

Strongest form: the shares are this very chunk's own true deficits (an oracle where the method has an
average), and every row served is exact: the longest head runs in context through all layers, where it
sees exact KV only, and each layer keeps the share it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.arms import Served
from lab.baselines.deviation import deviation
from lab.baselines.rows import Budgeted, mix, rows_bytes, spread
from lab.recompute import recompute
from lab.scene import Scene


@dataclass(frozen=True)
class VLCache(Budgeted):
    """First tokens recomputed in context, layer by layer as many as the layer's deficit earns."""

    kind = "vlcache"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV with heads of differing length fresh."""
        weights = [
            float(deviation(true, blind).sum()) if blind else 0.0
            for true, blind in zip(scene.conditioned, scene.blind, strict=True)
        ]
        counts = spread(scene, self.rank, weights)
        head = torch.arange(max(counts))
        with scene.backbone.measure() as work:
            made = recompute(scene.backbone, scene.encoded, scene.positions, scene.context, scene.blind, head)
        rows = [head[:count] for count in counts]
        return Served(mix(scene, made.kv, rows), rows_bytes(scene, rows), float(head.numel()), work.forwards)
