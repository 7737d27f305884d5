"""First-k recompute, the repair of EPIC (arXiv:2410.15332) and MPIC (arXiv:2502.01960).

Both recompute the first k tokens of every reused chunk, where reuse leaves a false attention sink. Here
in its strongest form: the k tokens attend to the exact KV of everything before the chunk, and, being its
head, only to each other inside it, so their KV is that of a full prefill to rounding. (MPIC recomputes a
prompt's text tokens too; a chunk's own text is counted among its tokens here.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab.arms import Served
from lab.baselines.rows import Budgeted, everywhere, rows_bytes, tokens_afforded
from lab.recompute import recompute
from lab.scene import Scene


@dataclass(frozen=True)
class FirstK(Budgeted):
    """The first tokens of the chunk, recomputed in context; the rest blind."""

    kind = "first-k"

    def serve(self, scene: Scene, question: torch.Tensor | None = None) -> Served:
        """Blind KV with the first k tokens fresh at every layer."""
        return recompute_tokens(scene, torch.arange(tokens_afforded(scene, self.rank)))


def recompute_tokens(scene: Scene, tokens: torch.Tensor) -> Served:
    """Blind KV with ``tokens`` recomputed in context at every layer, and its price."""
    with scene.backbone.measure() as work:
        made = recompute(scene.backbone, scene.encoded, scene.positions, scene.context, scene.blind, tokens)
    stored = rows_bytes(scene, everywhere(scene, tokens))
    return Served(made.kv, stored, float(tokens.numel()), work.forwards)
