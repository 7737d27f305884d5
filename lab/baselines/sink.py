"""Attention sink and recency, after StreamingLLM (arXiv:2309.17453).

StreamingLLM keeps a few initial tokens, on which attention rests, and the most recent ones, and drops the
middle. As a repair of a reused chunk: four tokens at its head and the rest of the budget at its tail are
recomputed in context. Strongest form: nothing is dropped (the middle stays, blind), and recomputed tokens
attend to the exact KV of everything before the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.arms import Served
from lab.baselines.first_k import recompute_tokens
from lab.baselines.rows import Budgeted, tokens_afforded
from lab.scene import Scene

SINKS = 4
"""Initial tokens, as many as the method keeps."""


@dataclass(frozen=True)
class AttentionSink(Budgeted):
    """The chunk's first four tokens and its last ones, recomputed in context; the middle blind."""

    kind = "sink"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV with head and tail fresh at every layer."""
        afforded, tokens = tokens_afforded(scene, self.rank), scene.target.num_tokens
        head = min(SINKS, afforded)
        return recompute_tokens(
            scene, torch.cat([torch.arange(head), torch.arange(tokens - (afforded - head), tokens)])
        )
