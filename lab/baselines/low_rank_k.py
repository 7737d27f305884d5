"""Low-rank keys, after ShadowKV (arXiv:2410.21465): K rebuilt from factors taken before RoPE, V as it is.

ShadowKV keeps a truncated SVD of the pre-RoPE keys and fetches V in full. As a repair of reused KV its
factors hold *absolute* keys where a patch holds what the canonical lacks.

Strongest form: the factors are those of the keys behind these antecedents (of the whole latent under MLA,
from which keys are made); all the budget goes to them, none to V, and none to the first layer, whose keys
are exact; a channel whose factors come out further from the truth than the canonical keeps the canonical
and stores nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera.ops import Channel, factor, kv_of, relocate_kv
from lab.arms import Served
from lab.baselines.rows import Budgeted, live_layers
from lab.scene import Scene


@dataclass(frozen=True)
class LowRankK(Budgeted):
    """Keys of the re-prefill at the rank the budget affords; values canonical."""

    kind = "low-rank-k"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Rebuilt keys, canonical values."""
        rank, stored = key_rank(scene, self.rank), 0
        layers = [dict(layer) for layer in scene.canonical]
        for i, channel in _key_channels(scene):
            canonical = layers[i][channel.name]
            own = canonical.transpose(0, 1).flatten(1)
            delta = scene.delta[i][channel.name]
            true = own.to(delta) + delta
            factors = factor(true, rank)
            rebuilt = factors.dense()
            if float((rebuilt - true).norm()) < float(delta.norm()):
                layers[i][channel.name] = (
                    rebuilt.unflatten(1, (channel.heads, channel.dim)).transpose(0, 1).to(canonical.dtype)
                )
                stored += factors.rank * sum(true.shape) * scene.dtype.itemsize
        kv = kv_of(layers, scene.canonical.groups)
        return Served(relocate_kv(kv, scene.layout, scene.offset), stored)


def key_rank(scene: Scene, rank: int) -> int:
    """The rank of key factors over all live layers that a plain rank-``rank`` patch would pay for."""
    tokens, size = scene.target.num_tokens, scene.dtype.itemsize

    def cost(r: int) -> int:
        return sum(size * min(r, tokens, c.features) * (tokens + c.features) for _, c in _key_channels(scene))

    widest = max(min(tokens, c.features) for _, c in _key_channels(scene))
    budget = scene.budget(rank)
    return max(r for r in range(widest + 1) if cost(r) <= budget)


def _key_channels(scene: Scene) -> list[tuple[int, Channel]]:
    """Layers and channels keys are made of: K, or the latent with its phased part."""
    return [(i, c) for i in live_layers(scene) for c in scene.layout[i].channels if c.name != "v"]
