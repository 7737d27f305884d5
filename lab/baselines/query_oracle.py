"""Query-aware oracle, after Quest (arXiv:2406.10774): the tokens this very question looks at, exact.

Quest reads only the pages of a cache that a query's keys bound as critical. As a repair of reused KV the
idea becomes: spend the budget on the tokens the question attends to.

Strongest form: single tokens instead of pages; true attention weights over the true KV instead of a
bound; a set of its own at every layer; exact rows. All of it takes a re-prefill and the question itself,
so this arm saves nothing; it bounds every query-aware selector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kamera.engines.hf import forwards
from kamera.ops import kv_tokens
from lab.arms import Served
from lab.attention import attention_mass
from lab.baselines.deviation import highest
from lab.baselines.rows import Budgeted, live_layers, mix, rows_bytes, tokens_afforded
from lab.scene import Scene


@dataclass(frozen=True)
class QueryOracle(Budgeted):
    """Each layer's most attended tokens, exact; the rest blind."""

    kind = "query-oracle"
    per_question = True

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV with the tokens of highest attention mass fresh. Raises ValueError without a question."""
        if question is None:
            raise ValueError(f"{self.name} chooses tokens by the question: serve it with one")
        before, count = kv_tokens(scene.context), tokens_afforded(scene, self.rank)
        masses = attention_mass(
            scene.backbone,
            question,
            scene.question_positions(int(question.shape[0])),
            forwards.make_cache(scene.backbone, [scene.context, scene.conditioned]),
        )
        live = set(live_layers(scene))
        rows = [highest(m[before:], count if i in live else 0) for i, m in enumerate(masses)]
        kv = mix(scene, scene.conditioned, rows)
        return Served(kv, rows_bytes(scene, rows), float(scene.target.num_tokens), 1)
