"""What token-axis baselines share: their budget in rows, where rows count, and how rows are mixed in.

A row is one token's KV at one layer. The first layer's KV never depends on what stands before (no
attention precedes it), so a baseline neither stores rows there nor pays for them; a patch stores
nothing there either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.ops import KV, kv_copy
from lab.scene import Scene


@dataclass(frozen=True)
class Budgeted:
    """An arm ``kind@rank`` that may store what a plain rank-``rank`` patch does."""

    rank: int
    kind = "rows"
    per_question = False

    @property
    def name(self) -> str:
        """``kind@rank``."""
        return f"{self.kind}@{self.rank}"


def live_layers(scene: Scene) -> list[int]:
    """Layers whose KV can differ behind antecedents: all that keep KV, but the first."""
    return [i for i, spec in enumerate(scene.layout) if i and spec.channels]


def row_bytes(scene: Scene) -> list[int]:
    """Bytes of one token's KV at each layer."""
    return [sum(c.features for c in spec.channels) * scene.dtype.itemsize for spec in scene.layout]


def tokens_afforded(scene: Scene, rank: int) -> int:
    """How many tokens' KV over all layers a plain rank-``rank`` patch would pay for (paper, table 6)."""
    return min(scene.target.num_tokens, scene.budget(rank) // sum(row_bytes(scene)))


def spread(scene: Scene, rank: int, weights: Sequence[float]) -> list[int]:
    """Rows per layer, in proportion to ``weights`` (one per layer), for the bytes of the same budget.

    The bytes are those of `tokens_afforded` tokens at every live layer. No layer gets more rows than the
    chunk has tokens; what one cannot use goes to the others.
    """
    sizes, tokens = row_bytes(scene), scene.target.num_tokens
    wanted = [i for i in live_layers(scene) if weights[i] > 0]
    left = tokens_afforded(scene, rank) * sum(sizes[i] for i in live_layers(scene))
    counts = [0] * len(sizes)
    while wanted:
        total = sum(weights[i] for i in wanted)
        share = {i: left * weights[i] / total / sizes[i] for i in wanted}
        full = [i for i in wanted if share[i] >= tokens]
        if not full:
            for i in wanted:
                counts[i] = int(share[i] + 1e-9)
            break
        for i in full:
            counts[i] = tokens
            left -= tokens * sizes[i]
        wanted = [i for i in wanted if i not in full]
    return counts


def mix(scene: Scene, fresh: KV, rows: Sequence[torch.Tensor]) -> KV:
    """Blind KV with ``rows`` (per layer, int64 ``[k]``) taken from ``fresh``, which is at the same place."""
    mixed = kv_copy(scene.blind)
    for layer, new, chosen in zip(mixed, fresh, rows, strict=True):
        for name, tensor in layer.items():
            at = chosen.to(tensor.device)
            tensor[:, at] = new[name][:, at]
    return mixed


def rows_bytes(scene: Scene, rows: Sequence[torch.Tensor]) -> int:
    """Bytes of these rows, those of the first layer left out."""
    sizes = row_bytes(scene)
    return sum(sizes[i] * rows[i].numel() for i in live_layers(scene))


def everywhere(scene: Scene, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The same tokens at every live layer."""
    live = set(live_layers(scene))
    return [tokens if i in live else tokens[:0] for i in range(len(scene.layout))]
