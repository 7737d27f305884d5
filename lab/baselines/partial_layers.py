"""Partial re-prefill by depth: shallow layers reused, deep ones recomputed in context for every token.

The one recompute that keeps up in Kamera's own paper (arXiv:2606.23581, appendix C.3), after the finding
that what a chunk absorbs from its antecedents arises deep. Its price is compute, not bytes: ``layers@p``
recomputes the deepest ``p`` % of the layers for all tokens, and replaces their whole KV.

Strongest form: all tokens, exact context, and the true canonical hidden states at the entry, which come
from the chunk's prefill behind the anchor and would have to be stored with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lab.arms import Served
from lab.baselines.rows import row_bytes
from lab.recompute import Resume, hidden_states, recompute
from lab.scene import Scene


@dataclass(frozen=True)
class PartialLayers:
    """The deepest ``percent`` of the layers (rounded up) recomputed in context."""

    percent: int
    per_question = False

    def __post_init__(self) -> None:
        if not 1 <= self.percent <= 100:
            raise ValueError(f"layers@{self.percent}: give the percentage of layers, 1 to 100")

    @property
    def name(self) -> str:
        """``layers@percent``."""
        return f"layers@{self.percent}"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV in shallow layers, recomputed KV in deep ones."""
        layers, tokens = len(scene.layout), scene.target.num_tokens
        deep = math.ceil(layers * self.percent / 100)
        first = layers - deep
        entry = hidden_states(
            scene.backbone, scene.encoded, scene.canonical_positions, scene.anchor.kv, first
        )
        with scene.backbone.measure() as work:
            made = recompute(
                scene.backbone,
                scene.encoded,
                scene.positions,
                scene.context,
                scene.blind,
                torch.arange(tokens),
                resume=Resume(first, entry),
            )
        replaced = tokens * sum(row_bytes(scene)[first:])
        return Served(made.kv, replaced, tokens * deep / layers, work.forwards)
